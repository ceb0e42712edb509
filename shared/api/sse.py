"""Streamed answers as server-sent events: owns the chunks' bytes; not sockets.

Every chunk of a stream shares its first and last bytes, so these are made once and a token costs one
JSON string between them. A stream is: role chunks, text chunks, one finish chunk a choice, a usage
chunk if asked for, ``[DONE]``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from shared.api.errors import error_json
from shared.api.logprobs import CompletionLogprobs, chat_logprobs, shown_logprobs
from shared.api.responses import AnswerForm, add_usage, usage_json
from shared.errors import TriptychError
from shared.types.inference import Accepted, Delta, Output, Usage

_DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.encode


def error_event(error: TriptychError) -> bytes:
    """The event after which a broken stream is closed, without ``[DONE]``."""
    return b"data: " + error_json(error) + b"\n\n"


class ChunkWriter(ABC):
    """Turns outputs of one call into events. Subclasses know the chunk's form. Not thread-safe."""

    kind: ClassVar[str]
    id_prefix: ClassVar[str]
    #: What stands between the choice's index and its text, and after its text.
    text_open: ClassVar[bytes]
    text_close: ClassVar[bytes]
    finish_delta: ClassVar[bytes]

    def __init__(self, form: AnswerForm) -> None:
        self._model, self._n, self._options, self._names = form
        options = form.options
        self._plain = not (options.logprobs or options.return_token_ids or options.continuous_usage)
        self._head = b""
        self._tail = b',"usage":null}\n\n' if options.include_usage else b"}\n\n"
        self._text_close = self.text_close + b',"logprobs":null,"finish_reason":null}]' + self._tail
        self._openings: dict[int, bytes] = {}
        self._prompt_ids: dict[int, tuple[int, ...]] = {}
        self._usage = Usage(0, 0)
        self._counted = Usage(0, 0)
        self._num_running = 0

    def write(self, prompt: int, outputs: Sequence[Output]) -> bytes:
        """The events of outputs of the request with this index; perhaps none."""
        events: list[bytes] = []
        # Usage comes last, often with the last token, whose chunk then tells the same.
        if outputs and isinstance(last := outputs[-1], Usage):
            self._usage = add_usage(self._usage, last)
            self._num_running -= 1
        for output in outputs:
            if isinstance(output, Delta):
                index = prompt * self._n + output.choice
                if self._plain:
                    if output.text:
                        events += (self._openings[index], _encode(output.text), self._text_close)
                else:
                    events.append(self._rich(index, output))
                if output.finish_reason:
                    events.append(self._finish(index, output))
            elif isinstance(output, Accepted):
                events.append(self._accept(prompt, output))
        return b"".join(events)

    def finish(self) -> bytes:
        """The events that end the stream."""
        if not self._options.include_usage:
            return _DONE
        usage = _encode(usage_json(self._usage))
        return self._head + b'"choices":[],"usage":' + usage + b"}\n\n" + _DONE

    def _accept(self, prompt: int, accepted: Accepted) -> bytes:
        if not self._head:
            fields = {"id": self.id_prefix + accepted.request_id, "object": self.kind}
            shared = _encode(fields | {"created": accepted.created, "model": self._model})
            self._head = b"data: " + shared[:-1] + b","
        indices = range(prompt * self._n, (prompt + 1) * self._n)
        for index in indices:
            self._openings[index] = self._choice_opening(index) + self.text_open
        self._num_running += 1
        self._counted = add_usage(self._counted, Usage(len(accepted.prompt_token_ids), 0))
        if self._options.return_token_ids:
            self._prompt_ids[prompt] = accepted.prompt_token_ids
        return self._first_events(indices, accepted)

    def _choice_opening(self, index: int) -> bytes:
        return self._head + b'"choices":[{"index":%d,' % index

    def _finish(self, index: int, delta: Delta) -> bytes:
        reason = b',"logprobs":null,"finish_reason":' + _encode(delta.finish_reason)
        if delta.stop_reason is not None:
            reason += b',"stop_reason":' + _encode(delta.stop_reason)
        return self._choice_opening(index) + self.finish_delta + reason + b"}]" + self._closing()

    def _rich(self, index: int, delta: Delta) -> bytes:
        """A chunk with log-probabilities, ids or running usage; empty when there is nothing to say."""
        listing = b"null"
        if self._options.logprobs:
            keep = self._options.return_token_ids or self._options.include_stop
            listing = self._listing(index, delta, keep)
        ids = b""
        if self._options.return_token_ids and delta.token_ids:
            ids = b',"token_ids":' + _encode(delta.token_ids) + self._choice_prompt_ids(index)
        self._counted = add_usage(self._counted, Usage(0, len(delta.token_ids)))
        if not (delta.text or ids or listing != b"null"):
            return b""
        opening = self._openings[index] + _encode(delta.text) + self.text_close
        return opening + b',"logprobs":' + listing + b',"finish_reason":null' + ids + b"}]" + self._closing()

    def _closing(self) -> bytes:
        if not self._options.continuous_usage:
            return self._tail
        # Cached tokens are known of a request once it has ended.
        known = not self._num_running
        counted = add_usage(self._counted, Usage(0, 0, self._usage.cached_tokens)) if known else self._counted
        return b',"usage":' + _encode(usage_json(counted, cached_known=known)) + b"}\n\n"

    @abstractmethod
    def _first_events(self, indices: range, accepted: Accepted) -> bytes:
        """Events due before any text of these choices."""

    @abstractmethod
    def _listing(self, index: int, delta: Delta, keep_closing: bool) -> bytes:
        """The log-probabilities of ``delta`` as JSON; null when it has none to list."""

    def _choice_prompt_ids(self, index: int) -> bytes:
        return b""


class ChatChunks(ChunkWriter):
    kind, id_prefix = "chat.completion.chunk", "chatcmpl-"
    text_open, text_close, finish_delta = b'"delta":{"content":', b"}", b'"delta":{}'

    def _first_events(self, indices: range, accepted: Accepted) -> bytes:
        role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        events: list[bytes] = []
        for index in indices:
            ids = b""
            if self._options.return_token_ids and index == 0:
                ids = b',"prompt_token_ids":' + _encode(accepted.prompt_token_ids)
            events += (self._choice_opening(index), role, ids, self._closing())
        return b"".join(events)

    def _listing(self, index: int, delta: Delta, keep_closing: bool) -> bytes:
        token_ids, logprobs = shown_logprobs(delta, keep_closing=keep_closing)
        if not logprobs:
            return b"null"
        return _encode({"content": chat_logprobs(token_ids, logprobs, self._names), "refusal": None})


class CompletionChunks(ChunkWriter):
    kind, id_prefix = "text_completion", "cmpl-"
    text_open, text_close, finish_delta = b'"text":', b"", b'"text":""'

    def __init__(self, form: AnswerForm) -> None:
        super().__init__(form)
        self._listings: dict[int, CompletionLogprobs] = {}

    def _first_events(self, indices: range, accepted: Accepted) -> bytes:
        return b""

    def _listing(self, index: int, delta: Delta, keep_closing: bool) -> bytes:
        token_ids, logprobs = shown_logprobs(delta, keep_closing=keep_closing)
        if not logprobs:
            return b"null"
        listing = self._listings.setdefault(index, CompletionLogprobs())
        return _encode(listing.part(token_ids, logprobs, self._names))

    def _choice_prompt_ids(self, index: int) -> bytes:
        """The prompt's ids, in the first chunk of the first choice of each prompt."""
        prompt_ids = self._prompt_ids.pop(index // self._n, None) if index % self._n == 0 else None
        return b"" if prompt_ids is None else b',"prompt_token_ids":' + _encode(prompt_ids)
