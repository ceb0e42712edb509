"""The sampling chain, from logits to a token: the torch-free reference that every twin must equal.

Owns the order of the stages and the rule for ties. Owns no state and no finish rule.

Order: log-probabilities of the model's own distribution are taken first; then logit bias, minimum
length, repetition, frequency and presence penalty; then the likeliest token at temperature 0, else
temperature, min_p, top_k, top_p and a draw. All arithmetic is float64.

Candidates are ranked by (logit descending, id ascending), so the lower id wins every tie. Each
truncation keeps a prefix of that ranking. The draw walks the survivors in the order of their ids.

Shapes: V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.errors import NumericalError
from shared.sampling.rng import uniform
from shared.sampling.row import Sampled, adjusts_logits, forbidden_ids
from shared.types.request import SamplingParams, TokenLogprobs

Floats = npt.NDArray[np.float64]


def sample(
    logits_V: npt.NDArray[Any],
    params: SamplingParams,
    *,
    choice: int,
    history: Sequence[int],
    num_prompt_tokens: int,
    eos_token_ids: Sequence[int],
    masked_from: int | None = None,
) -> Sampled:
    """Sample one token; nothing is changed.

    Ids from ``masked_from`` on do not exist: they are neither sampled nor part of the reported
    distribution. Raises NumericalError when a logit is NaN or +inf, or when no token is possible.
    """
    raw_V = np.asarray(logits_V[:masked_from], dtype=np.float64)
    check_finite(raw_V)
    x_V = raw_V
    if adjusts_logits(params):
        x_V = _adjust(raw_V, params, history, num_prompt_tokens, eos_token_ids)
    if params.temperature == 0:
        token_id = int(np.argmax(x_V))
    else:
        weights_V = _truncated_weights(x_V, params)
        token_id = _draw(weights_V, uniform(params.seed, choice, len(history)))
    logprobs = None if params.logprobs is None else token_logprobs(raw_V, token_id, params.logprobs)
    return Sampled(token_id, logprobs)


def check_finite(x_V: npt.NDArray[Any]) -> None:
    """Raises NumericalError unless the largest value is finite (NaN counts as largest)."""
    if not np.isfinite(x_V.max(initial=-np.inf)):
        raise NumericalError("the model produced no finite logits")


def token_logprobs(raw_V: Floats, token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities of the unprocessed distribution. Impossible tokens are never listed."""
    peak = raw_V.max()
    logprobs_V = raw_V - (peak + np.log(np.exp(raw_V - peak).sum()))
    ranking = np.argsort(-raw_V, kind="stable")
    top = [int(i) for i in ranking[:num_top] if np.isfinite(raw_V[i])]
    return TokenLogprobs(
        logprob=float(logprobs_V[token_id]),
        rank=int(np.flatnonzero(ranking == token_id)[0]),
        top_ids=tuple(top),
        top_logprobs=tuple(float(logprobs_V[i]) for i in top),
    )


def _adjust(
    raw_V: Floats,
    params: SamplingParams,
    history: Sequence[int],
    num_prompt_tokens: int,
    eos_token_ids: Sequence[int],
) -> Floats:
    """A processed copy. Ids outside the vocabulary (placeholders, say) are passed over; those of
    the logit bias are distinct."""
    x_V = raw_V.copy()
    size = len(x_V)
    for token_id, bias in params.logit_bias:
        if token_id < size:
            x_V[token_id] += bias
    for token_id in forbidden_ids(params, len(history) - num_prompt_tokens, eos_token_ids):
        if token_id < size:
            x_V[token_id] = -np.inf
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.asarray(history, dtype=np.int64))
        seen = seen[seen < size]
        old = x_V[seen]
        r = params.repetition_penalty
        x_V[seen] = np.where(old > 0, old / r, old * r)
    if params.frequency_penalty or params.presence_penalty:
        output = np.asarray(history[num_prompt_tokens:], dtype=np.int64)
        ids, counts = np.unique(output[output < size], return_counts=True)
        x_V[ids] -= counts * params.frequency_penalty
        x_V[ids] -= params.presence_penalty
    check_finite(x_V)
    return x_V


def _truncated_weights(x_V: Floats, params: SamplingParams) -> Floats:
    """exp of the tempered logits relative to the largest, zero for what is cut off."""
    # A tiny temperature may overflow to -inf, which is the right limit: weight 0.
    with np.errstate(over="ignore"):
        weights_V: Floats = np.exp((x_V - x_V.max()) / params.temperature)
    if params.min_p <= 0 and params.top_k <= 0 and params.top_p >= 1.0:
        return weights_V
    ranking = np.argsort(-x_V, kind="stable")
    num_kept = int((weights_V >= params.min_p).sum())
    if params.top_k > 0:
        num_kept = min(num_kept, params.top_k)
    if params.top_p < 1.0:
        mass = np.cumsum(weights_V[ranking[:num_kept]])
        num_kept = min(num_kept, int(np.searchsorted(mass, params.top_p * mass[-1])) + 1)
    weights_V[ranking[num_kept:]] = 0.0
    return weights_V


def _draw(weights_V: Floats, u: float) -> int:
    """Inverse of the cumulative distribution: the first id whose mass so far exceeds u of the total."""
    mass = np.cumsum(weights_V)
    return int(np.searchsorted(mass, u * mass[-1], side="right"))
