"""A generation request and its tokens, as every service sees them."""

from __future__ import annotations

from msgspec import Struct

FINISH_REASONS = ("stop", "length", "tool_calls", "content_filter", "abort")


class SamplingParams(Struct, frozen=True):
    """How each next token is chosen; a function of the request alone.

    ``seed`` is always set by the router. A draw is a function of (seed, choice index, token
    position), so a request can move between workers. ``logprobs`` is the number of top
    alternatives to report beside the chosen token (None: report nothing).
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None


class MediaItem(Struct, frozen=True):
    """One media item's place in the prompt: ``num_tokens`` placeholder positions from ``offset``.

    ``mm_hash`` (hex) covers the bytes, the decode options, the processor version and the salt.
    """

    mm_hash: str
    offset: int
    num_tokens: int


class GenerationRequest(Struct, frozen=True):
    """One worker-level request: a prompt, what was emitted so far, and the choices still wanted.

    ``request_id`` is unique for each attempt, so that events of an abandoned attempt cannot be
    mistaken for those of its successor. ``token_ids`` is the prompt followed by ``num_emitted``
    tokens; more than one choice shares a request only while nothing was emitted.
    ``deadline_s`` is the time left, never an instant.
    """

    request_id: str
    model: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    num_emitted: int = 0
    choices: tuple[int, ...] = (0,)
    media: tuple[MediaItem, ...] = ()
    cache_salt: str = ""
    adapter: str = ""
    priority: int = 0
    deadline_s: float | None = None
    traceparent: str = ""


class TokenLogprobs(Struct, frozen=True):
    """Log-probabilities at one position, of the model's own distribution (before penalties and
    temperature): the chosen token, its rank (0 = likeliest), and the top alternatives, likeliest first."""

    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
