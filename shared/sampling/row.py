"""What sampling must know of one row, and the questions that all samplers ask of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shared.types.request import SamplingParams, TokenLogprobs


class SamplerRow(NamedTuple):
    """One token to be sampled. ``history`` is the prompt followed by what was emitted: its length
    is the position of the new token. It is read during the call only, never kept or changed."""

    params: SamplingParams
    choice: int
    history: Sequence[int]
    num_prompt_tokens: int
    eos_token_ids: Sequence[int]


class Sampled(NamedTuple):
    """One sampled token; ``logprobs`` is None where the parameters ask for none."""

    token_id: int
    logprobs: TokenLogprobs | None


def adjusts_logits(params: SamplingParams) -> bool:
    """Whether bias, a minimum length or a penalty can change the logits."""
    return bool(
        params.logit_bias
        or params.min_tokens
        or params.repetition_penalty != 1.0
        or params.frequency_penalty
        or params.presence_penalty
    )


def is_plain_greedy(params: SamplingParams) -> bool:
    """Whether the token is simply the likeliest one, with nothing else to report."""
    return params.temperature == 0 and params.logprobs is None and not adjusts_logits(params)


def forbidden_ids(params: SamplingParams, num_emitted: int, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """Ids that would end the answer before its minimum length."""
    if num_emitted >= params.min_tokens:
        return ()
    return (*eos_token_ids, *params.stop_token_ids)
