"""Whole answers, not streamed: owns the two response objects; not how outputs arrive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from shared.api.logprobs import CompletionLogprobs, TokenBytes, chat_logprobs, shown_logprobs
from shared.api.openai import ResponseOptions
from shared.types.inference import Accepted, Delta, Output, Usage
from shared.types.request import TokenLogprobs


class AnswerForm(NamedTuple):
    """What an answer's form depends on beside its outputs. ``names`` must hold the bytes of every id
    that is to be listed before it is listed."""

    model: str
    n: int
    options: ResponseOptions
    names: TokenBytes


class _Choice:
    """What has come of one choice."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.shown_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None


class ResponseCollector(ABC):
    """Takes outputs until the last and gives the response's JSON. Subclasses know the object's form."""

    def __init__(self, form: AnswerForm) -> None:
        self._model, self._n, self._options, self._names = form
        self._accepted: dict[int, Accepted] = {}
        self._choices: dict[int, _Choice] = {}
        self._usage = Usage(0, 0)

    @abstractmethod
    def finish(self) -> bytes:
        """The response, once every choice has finished."""

    def add(self, prompt: int, outputs: Sequence[Output]) -> None:
        """Take outputs of the request with this index."""
        for output in outputs:
            if isinstance(output, Delta):
                self._add_delta(self._choices[prompt * self._n + output.choice], output)
            elif isinstance(output, Accepted):
                self._accepted[prompt] = output
                for index in range(prompt * self._n, (prompt + 1) * self._n):
                    self._choices[index] = _Choice()
            else:
                self._usage = add_usage(self._usage, output)

    def _add_delta(self, choice: _Choice, delta: Delta) -> None:
        choice.texts.append(delta.text)
        choice.token_ids += delta.token_ids
        if self._options.logprobs:
            keep = self._options.return_token_ids or self._options.include_stop
            token_ids, logprobs = shown_logprobs(delta, keep_closing=keep)
            choice.shown_ids += token_ids
            choice.logprobs += logprobs
        if delta.finish_reason:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason

    def _choice_json(self, index: int, choice: _Choice) -> dict[str, Any]:
        fields: dict[str, Any] = {"index": index, "finish_reason": choice.finish_reason}
        if choice.stop_reason is not None:
            fields["stop_reason"] = choice.stop_reason
        if self._options.return_token_ids:
            fields["token_ids"] = choice.token_ids
        return fields

    def _body(self, prefix: str, kind: str, choices: list[dict[str, Any]], **more: Any) -> bytes:
        first = self._accepted[0]
        fields = {"id": prefix + first.request_id, "object": kind, "created": first.created}
        fields |= {"model": self._model, "choices": choices, "usage": usage_json(self._usage)}
        return msgspec.json.encode(fields | more)


class ChatCollector(ResponseCollector):
    def finish(self) -> bytes:
        choices = []
        for index, choice in sorted(self._choices.items()):
            message = {"role": "assistant", "content": "".join(choice.texts), "refusal": None}
            fields = self._choice_json(index, choice) | {"message": message, "logprobs": None}
            if self._options.logprobs:
                content = chat_logprobs(choice.shown_ids, choice.logprobs, self._names)
                fields["logprobs"] = {"content": content, "refusal": None}
            choices.append(fields)
        more = {}
        if self._options.return_token_ids:
            more["prompt_token_ids"] = self._accepted[0].prompt_token_ids
        return self._body("chatcmpl-", "chat.completion", choices, **more)


class CompletionCollector(ResponseCollector):
    def finish(self) -> bytes:
        choices = []
        for index, choice in sorted(self._choices.items()):
            fields = self._choice_json(index, choice) | {"text": "".join(choice.texts), "logprobs": None}
            if self._options.logprobs:
                listing = CompletionLogprobs()
                fields["logprobs"] = listing.part(choice.shown_ids, choice.logprobs, self._names)
            if self._options.return_token_ids:
                fields["prompt_token_ids"] = self._accepted[index // self._n].prompt_token_ids
            choices.append(fields)
        return self._body("cmpl-", "text_completion", choices)


def add_usage(total: Usage, more: Usage) -> Usage:
    """The usage of both."""
    return Usage(
        total.prompt_tokens + more.prompt_tokens,
        total.completion_tokens + more.completion_tokens,
        total.cached_tokens + more.cached_tokens,
    )


def usage_json(usage: Usage, *, cached_known: bool = True) -> dict[str, Any]:
    """Usage as OpenAI writes it; without a word on cached tokens while they are not known."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens} if cached_known else None,
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
