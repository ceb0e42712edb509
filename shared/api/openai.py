"""OpenAI request bodies to inference requests: owns defaults and the rules between fields of this API;
neither field shapes (``schema``) nor the bounds that every front end has (``shared.types.bounds``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from shared.api.schema import ChatBody, ChatMessage, CompletionBody, GenerationBody, TextPart, decode_body
from shared.errors import InvalidRequest, TriptychError
from shared.types import bounds, inference
from shared.types.bounds import check_length, check_parts, check_picture, check_request
from shared.types.inference import ImagePart, InferenceRequest, Message, ModelCard
from shared.types.request import SamplingParams

#: From a media URL to the encoded bytes; raises a TriptychError.
ReadImage = Callable[[str], bytes]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_ROLES_NOT_YET = frozenset({"tool", "function"})
_MESSAGE_FIELDS_NOT_YET = ("tool_calls", "tool_call_id", "function_call", "refusal", "audio", "annotations")
_COMPLETION_MAX_TOKENS = 16
_MAX_PROMPT_CHOICES = 64


class ResponseOptions(Struct, frozen=True):
    """What the answer's form depends on, beside the answer."""

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False
    include_stop: bool = False


class ApiCall(Struct, frozen=True):
    """One HTTP call: ``requests`` are more than one only for a completion of several prompts, all with
    the same ``n``."""

    requests: tuple[InferenceRequest, ...]
    options: ResponseOptions

    @property
    def n(self) -> int:
        return self.requests[0].n


class CallLabels(Struct, frozen=True):
    """What headers say about a call; ``request_id`` is the client's own."""

    request_id: str = ""
    traceparent: str = ""


def model_name(fields: dict[str, Any]) -> str:
    """The model a body asks for. Raises InvalidRequest."""
    name = fields.get("model")
    if not isinstance(name, str) or not name:
        raise InvalidRequest("model must be a non-empty string", param="model")
    return name


def parse_chat(fields: dict[str, Any], card: ModelCard, read_image: ReadImage, labels: CallLabels) -> ApiCall:
    """A chat completion. Raises InvalidRequest and whatever ``read_image`` raises."""
    check_parts(_num_parts(fields.get("messages")))
    body = decode_body(fields, ChatBody)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs", param="top_logprobs")
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    if body.max_tokens and body.max_completion_tokens and body.max_tokens != body.max_completion_tokens:
        message = "max_tokens and max_completion_tokens differ; max_completion_tokens alone is enough"
        raise InvalidRequest(message, param="max_tokens")
    max_tokens = body.max_completion_tokens or body.max_tokens or 0
    messages = tuple(
        _message(message, f"messages[{index}]", card, read_image)
        for index, message in enumerate(body.messages)
    )
    request = _request(body, card, labels, _sampling(body, max_tokens, num_logprobs), messages=messages)
    return ApiCall((request,), _options(body))


def parse_completion(fields: dict[str, Any], card: ModelCard, labels: CallLabels) -> ApiCall:
    """A text completion of one or more prompts. Raises InvalidRequest."""
    body = decode_body(fields, CompletionBody)
    prompts = _prompts(body.prompt, body.n or 1, card)
    sampling = _sampling(body, body.max_tokens or _COMPLETION_MAX_TOKENS, body.logprobs)
    requests = tuple(
        _request(body, card, labels, sampling, prompt=prompt)
        if isinstance(prompt, str)
        else _request(body, card, labels, sampling, prompt_token_ids=tuple(prompt))
        for prompt in prompts
    )
    return ApiCall(requests, _options(body))


def _request(
    body: GenerationBody, card: ModelCard, labels: CallLabels, sampling: SamplingParams, **prompt: Any
) -> InferenceRequest:
    request = InferenceRequest(
        model=card.name,
        sampling=sampling,
        n=body.n or 1,
        seed=body.seed,
        stop=_stops(body),
        include_stop_str=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        label=labels.request_id or body.request_id or "",
        traceparent=labels.traceparent,
        **prompt,
    )
    check_request(request, card)
    return request


def _options(body: GenerationBody) -> ResponseOptions:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream", param="stream_options")
    stream_options = body.stream_options
    logprobs = body.logprobs if isinstance(body, ChatBody | CompletionBody) else None
    return ResponseOptions(
        stream=bool(body.stream),
        include_usage=bool(stream_options and stream_options.include_usage),
        continuous_usage=bool(stream_options and stream_options.continuous_usage_stats),
        logprobs=logprobs is not None and logprobs is not False,
        return_token_ids=bool(body.return_token_ids),
        include_stop=bool(body.include_stop_str_in_output),
    )


def _sampling(body: GenerationBody, max_tokens: int, num_logprobs: int | None) -> SamplingParams:
    """``max_tokens`` 0 = as many as the context allows."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_or(body.temperature, 1.0),
        top_k=max(0, body.top_k or 0),
        top_p=_or(body.top_p, 1.0),
        min_p=_or(body.min_p, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        logit_bias=_logit_bias(body.logit_bias or {}),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
        logprobs=num_logprobs,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _stops(body: GenerationBody) -> tuple[str, ...]:
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def _logit_bias(bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    if not all(key.isascii() and key.isdecimal() and len(key) <= 10 for key in bias):
        raise InvalidRequest("logit_bias keys must be token ids", param="logit_bias")
    return tuple(sorted({int(key): value for key, value in bias.items()}.items()))


def _num_parts(messages: Any) -> int:
    """Parts of a body's messages, counted before anything is done for each; 0 for what is no list."""
    if not isinstance(messages, list) or len(messages) > bounds.MAX_PARTS:
        return len(messages) if isinstance(messages, list) else 0
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    return sum(len(content) if isinstance(content, list) else 1 for content in contents)


def _prompts(prompt: Any, num_choices: int, card: ModelCard) -> list[str | list[int]]:
    """The four shapes as a list of prompts. How many there are is looked at before any of them is."""
    malformed = InvalidRequest("prompt must be a string, token ids, or a list of either", param="prompt")
    if not isinstance(prompt, str | list):
        raise malformed
    is_several = isinstance(prompt, list) and not (prompt and type(prompt[0]) is int)
    prompts = list(prompt) if is_several else [prompt]
    if len(prompts) * num_choices > _MAX_PROMPT_CHOICES:
        raise InvalidRequest(f"at most {_MAX_PROMPT_CHOICES} choices over all prompts", param="prompt")
    if not prompts or not all(prompts):
        raise InvalidRequest("prompt is empty", param="prompt")
    for item in prompts:
        if isinstance(item, str):
            continue
        if not isinstance(item, list):
            raise malformed
        check_length(len(item), card, "prompt")
        if any(type(token_id) is not int for token_id in item):
            raise malformed
    return prompts


def _message(message: ChatMessage, where: str, card: ModelCard, read_image: ReadImage) -> Message:
    role = _ROLES.get(message.role)
    if role is None:
        if message.role in _ROLES_NOT_YET:
            raise InvalidRequest(
                "this role is not supported yet", param=f"{where}.role", code="not_supported"
            )
        raise InvalidRequest(f"unknown role; known are {', '.join(_ROLES)}", param=f"{where}.role")
    for name in _MESSAGE_FIELDS_NOT_YET:
        if getattr(message, name):
            raise InvalidRequest(
                f"{name} is not supported yet", param=f"{where}.{name}", code="not_supported"
            )
    if message.content is None:
        raise InvalidRequest("content is missing", param=f"{where}.content")
    if isinstance(message.content, str):
        return Message(role, (inference.TextPart(message.content),))
    parts: list[inference.TextPart | ImagePart] = []
    for index, part in enumerate(message.content):
        if isinstance(part, TextPart):
            parts.append(inference.TextPart(part.text))
            continue
        path = f"{where}.content[{index}]"
        check_picture(role, card, path)
        parts.append(ImagePart(_read_image(part.image_url.url, read_image, f"{path}.image_url.url")))
    return Message(role, tuple(parts))


def _read_image(url: str, read_image: ReadImage, path: str) -> bytes:
    try:
        return read_image(url)
    except TriptychError as error:
        error.param = path
        raise
