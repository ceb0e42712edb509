"""Batched sampling on torch tensors, token for token what ``shared.sampling.chain`` returns.

Owns the short cuts: rows that only want the likeliest token never leave float32, and truncation
looks at the largest few logits instead of sorting a vocabulary. Owns no state between calls.

Shapes: R = rows, V = vocabulary, K = a few largest, S = survivors of truncation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from shared.sampling.device import ops
from shared.sampling.rng import uniform
from shared.sampling.row import SamplerRow, adjusts_logits, forbidden_ids
from shared.types.request import SamplingParams, TokenLogprobs

#: How many logits top_p sorts at first; nearly always enough to hold its mass.
_FIRST_LOOK = 1024


class BatchSamples(NamedTuple):
    """Parallel to the rows of the call. A row in ``failed`` had no finite logits: its token id is -1."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    failed: tuple[int, ...]


def sample_batch(
    logits_RV: torch.Tensor, rows: Sequence[SamplerRow], *, masked_from: int | None = None
) -> BatchSamples:
    """Sample one token a row; ``logits_RV`` is not changed.

    Ids from ``masked_from`` on do not exist: never sampled, not part of the reported distribution.
    Waits for the device. Non-finite rows are reported, not raised.
    """
    x_RV = logits_RV[:, :masked_from].detach()
    token_ids, finite = ops.argmax(x_RV)
    logprobs: list[TokenLogprobs | None] = [None] * len(rows)
    for r, row in enumerate(rows):
        if not finite[r]:
            token_ids[r] = -1
            continue
        params = row.params
        if params.temperature != 0 or adjusts_logits(params):
            token_ids[r] = _sample_row(x_RV[r].double(), row)
        if params.logprobs is not None and token_ids[r] >= 0:
            logprobs[r] = _token_logprobs(x_RV[r].double(), token_ids[r], params.logprobs)
    failed = tuple(r for r, token_id in enumerate(token_ids) if token_id < 0)
    return BatchSamples(token_ids, logprobs, failed)


def _sample_row(x_V: torch.Tensor, row: SamplerRow) -> int:
    """One row that is more than an argmax; ``x_V`` is a float64 copy and is changed. -1: nothing possible."""
    if adjusts_logits(row.params):
        _adjust(x_V, row)
    (best,), (possible,) = ops.argmax(x_V[None])
    if not possible:
        return -1
    if row.params.temperature == 0:
        return best
    scaled_V = (x_V - x_V[best]) / row.params.temperature
    ids_S = _survivors(x_V, scaled_V, row.params)
    weights_S = torch.exp(scaled_V if ids_S is None else scaled_V[ids_S])
    mass_S = torch.cumsum(weights_S, 0)
    u = uniform(row.params.seed, row.choice, len(row.history))
    index = int(torch.searchsorted(mass_S, u * mass_S[-1], right=True))
    return index if ids_S is None else int(ids_S[index])


def _adjust(x_V: torch.Tensor, row: SamplerRow) -> None:
    """Bias, minimum length and penalties, in place; ids outside the vocabulary are passed over."""
    params, size = row.params, x_V.shape[0]
    num_emitted = len(row.history) - row.num_prompt_tokens
    bias = [(i, value) for i, value in params.logit_bias if i < size]
    if bias:
        x_V[_index(x_V, [i for i, _ in bias])] += x_V.new_tensor([value for _, value in bias])
    forbidden = [i for i in forbidden_ids(params, num_emitted, row.eos_token_ids) if i < size]
    if forbidden:
        x_V[_index(x_V, forbidden)] = -torch.inf
    if params.repetition_penalty != 1.0:
        seen = _index(x_V, [i for i in set(row.history) if i < size])
        old = x_V[seen]
        r = params.repetition_penalty
        x_V[seen] = torch.where(old > 0, old / r, old * r)
    if params.frequency_penalty or params.presence_penalty:
        counts = Counter(i for i in row.history[row.num_prompt_tokens :] if i < size)
        ids = _index(x_V, list(counts))
        x_V[ids] -= x_V.new_tensor(list(counts.values())) * params.frequency_penalty
        x_V[ids] -= params.presence_penalty


def _index(like: torch.Tensor, ids: list[int]) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=like.device)


def _survivors(x_V: torch.Tensor, scaled_V: torch.Tensor, params: SamplingParams) -> torch.Tensor | None:
    """Ids that min_p, top_k and top_p leave, ascending; None when there is nothing to cut.

    All three keep a prefix of the ranking (logit descending, id ascending), so one number decides.
    """
    size = x_V.shape[0]
    bounded = 0 < params.top_k < size
    if params.min_p <= 0 and not bounded and params.top_p >= 1.0:
        return None
    num_kept = size
    if params.min_p > 0:
        num_kept = int((torch.exp(scaled_V) >= params.min_p).sum())
    if bounded:
        num_kept = min(num_kept, params.top_k)
    if params.top_p < 1.0:
        num_kept = _nucleus(scaled_V, params, num_kept, bounded=bounded)
    return _first_ranked(x_V, num_kept)


def _nucleus(scaled_V: torch.Tensor, params: SamplingParams, num_kept: int, *, bounded: bool) -> int:
    """How many of the ``num_kept`` first in the ranking hold top_p of their mass."""
    if num_kept > _FIRST_LOOK and not bounded:
        weights_V = torch.exp(scaled_V)
        if params.min_p > 0:
            weights_V[weights_V < params.min_p] = 0.0
        mass_K = torch.cumsum(torch.exp(ops.largest(scaled_V, _FIRST_LOOK)), 0)
        index = int(torch.searchsorted(mass_K, params.top_p * weights_V.sum()))
        if index < _FIRST_LOOK:
            return index + 1
    mass_K = torch.cumsum(torch.exp(ops.largest(scaled_V, num_kept)), 0)
    return min(num_kept, int(torch.searchsorted(mass_K, params.top_p * mass_K[-1])) + 1)


def _first_ranked(x_V: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the ``count`` first in the ranking, ascending; 0 < count <= V."""
    cut = ops.kth_largest(x_V, count)
    ids = torch.nonzero(x_V >= cut)[:, 0]
    surplus = ids.shape[0] - count
    if surplus == 0:
        return ids
    # Of the ids whose logit is the cut itself, the highest go.
    ties = ids[x_V[ids] == cut]
    keep = torch.ones_like(x_V, dtype=torch.bool)
    keep[ties[ties.shape[0] - surplus :]] = False
    return ids[keep[ids]]


def _token_logprobs(raw_V: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities of the unprocessed distribution; impossible tokens are never listed."""
    norm = torch.logsumexp(raw_V, 0)
    value = raw_V[token_id]
    rank = int((raw_V > value).sum() + (raw_V[:token_id] == value).sum())
    top: list[tuple[float, int]] = []
    if num_top > 0:
        ids_K = _first_ranked(raw_V, min(num_top, raw_V.shape[0]))
        pairs = zip((raw_V[ids_K] - norm).tolist(), ids_K.tolist(), strict=True)
        top = sorted((p for p in pairs if p[0] > -torch.inf), key=lambda p: (-p[0], p[1]))
    return TokenLogprobs(
        logprob=float(value - norm),
        rank=rank,
        top_ids=tuple(i for _, i in top),
        top_logprobs=tuple(p for p, _ in top),
    )
