"""What a client asks for and gets back: the interface between gateway (HTTP or gRPC) and router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from msgspec import Struct

from shared.types.request import SamplingParams, TokenLogprobs


class TextPart(Struct, frozen=True, tag=True):
    text: str


class ImagePart(Struct, frozen=True, tag=True):
    """The encoded bytes of one picture, as the client sent them."""

    data: bytes


class Message(Struct, frozen=True):
    """One chat turn. ``role`` as the chat template knows it; parts in the client's order."""

    role: str
    parts: tuple[TextPart | ImagePart, ...]


class InferenceRequest(Struct, frozen=True):
    """One client request. Exactly one of ``messages``, ``prompt``, ``prompt_token_ids`` is set.

    ``sampling.max_tokens`` 0 = as many as the context allows. ``seed`` None = the router draws one
    (``sampling.seed`` is overwritten). ``label`` is the client's own request id, never used as ours.
    """

    model: str
    sampling: SamplingParams
    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop_str: bool = False
    skip_special_tokens: bool = True
    cache_salt: str = ""
    priority: int = 0
    deadline_s: float | None = None
    label: str = ""
    traceparent: str = ""


class Accepted(Struct, frozen=True, tag=True):
    """First output of a request: it was validated and given an id."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    seed: int
    created: int


class Delta(Struct, frozen=True, tag=True):
    """More of one choice. ``text`` may be empty while ``token_ids`` is not (text held back for a
    stop string or an unfinished character) and the reverse. ``logprobs`` is parallel to
    ``token_ids`` when logprobs were asked for.
    ``stop_reason``: the stop string or stop token id that hit. ``finish_reason`` is set once, last.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str = ""
    stop_reason: str | int | None = None


class Usage(Struct, frozen=True, tag=True):
    """Last output of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


Output = Accepted | Delta | Usage


class ModelCard(Struct, frozen=True):
    """One served model, ``max_model_len`` in tokens. ``vocab_size`` bounds ids a client may send."""

    name: str
    max_model_len: int
    vocab_size: int
    created: int
    vision: bool = False


class InferenceService(Protocol):
    """What the gateway talks to: the router in this process, or one behind gRPC."""

    def generate(self, request: InferenceRequest) -> AsyncIterator[list[Output]]:
        """Batches of outputs in order; an Accepted first, a Usage last. Raises TriptychError.
        Closing the iterator aborts the request everywhere."""
        ...

    async def models(self) -> list[ModelCard]:
        """The models served now."""
        ...

    async def token_text(self, model: str, token_ids: tuple[int, ...]) -> list[bytes]:
        """Each token's own bytes, for logprob listings."""
        ...

    async def ready(self) -> bool:
        """Whether every phase has a live worker."""
        ...
