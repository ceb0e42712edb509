"""The bodies of OpenAI requests: owns names, types and ranges of fields; not what they lead to."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from shared.errors import InvalidRequest
from shared.types import bounds

_INT64 = (1 << 63) - 1

#: Accepted for the sake of clients, without effect.
_IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    }
)
#: Known to clients and not served yet, each with the values that ask for nothing.
_NOT_YET: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "structured_outputs": (),
    "prompt_logprobs": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logprob_token_ids": (),
    "truncate_prompt_tokens": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "thinking_token_budget": (),
    "include_reasoning": (),
    "documents": (),
    "mm_processor_kwargs": (),
    "media_io_kwargs": (),
    "use_beam_search": (False,),
    "prompt_embeds": (),
}

Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-bounds.MAX_PENALTY, le=bounds.MAX_PENALTY)]
Bias = Annotated[float, Meta(ge=-bounds.MAX_BIAS, le=bounds.MAX_BIAS)]
Logprobs = Annotated[int, Meta(ge=0, le=bounds.MAX_TOP_LOGPROBS)]
StopString = Annotated[str, Meta(min_length=1, max_length=bounds.MAX_STOP_BYTES)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that both kinds of completion share; None = absent."""

    model: str
    max_tokens: Annotated[int, Meta(ge=1, le=_INT64)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=bounds.MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None
    min_p: Probability | None = None
    n: Annotated[int, Meta(ge=1, le=bounds.MAX_CHOICES)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=bounds.MAX_STOPS)] | None = None
    seed: Annotated[int, Meta(ge=-_INT64 - 1, le=_INT64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=bounds.MAX_LOGIT_BIAS)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=bounds.MAX_REPETITION_PENALTY)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=bounds.MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=_INT64)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=bounds.MAX_SALT_CHARS)] | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] | None = None
    request_id: Annotated[str, Meta(min_length=1, max_length=bounds.MAX_LABEL_CHARS)] | None = None


class TextPart(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str


class ImageUrl(Struct, forbid_unknown_fields=True):
    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ImageUrlPart(Struct, tag_field="type", tag="image_url", forbid_unknown_fields=True):
    image_url: ImageUrl


class ChatMessage(Struct, forbid_unknown_fields=True):
    """One turn; the fields from ``tool_calls`` on may be there, but empty."""

    role: str
    content: str | Annotated[list[TextPart | ImageUrlPart], Meta(min_length=1)] | None = None
    name: str | None = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None
    refusal: Any = None
    audio: Any = None
    annotations: Any = None


class ChatBody(GenerationBody, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1, le=_INT64)] | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None


class CompletionBody(GenerationBody, forbid_unknown_fields=True, kw_only=True):
    """``prompt``: a string, ids, or a list of either."""

    prompt: Any
    logprobs: Logprobs | None = None


Body = TypeVar("Body", bound=GenerationBody)


def decode_body(fields: dict[str, Any], kind: type[Body]) -> Body:
    """The body as a record. Null equals absent. Raises InvalidRequest naming the field that is unknown,
    not served yet, of a wrong type or out of range."""
    given = {k: v for k, v in fields.items() if v is not None and k not in _IGNORED}
    wanted = set(kind.__struct_fields__)
    for name in given.keys() - wanted:
        if name in _NOT_YET:
            if given[name] not in _NOT_YET[name]:
                raise InvalidRequest(f"{name} is not supported yet", param=name, code="not_supported")
            del given[name]
        else:
            shown = name[:64]
            raise InvalidRequest(f"unknown field {shown!r}", param=shown, code="unknown_field")
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None


_PROBLEM = re.compile(r"(.*?)(?: - at `\$\.?([^`]*)`)?", re.DOTALL)
_NAMED_FIELD = re.compile(r"Object (?:missing required|contains unknown) field `([^`]{1,64})`?")
_ECHO = re.compile(r"Invalid (?:enum )?value '.*'", re.DOTALL)
_PART_TYPE = re.compile(r"messages\[\d+\]\.content\[\d+\]\.type")
_PART_TYPES = " and ".join(str(part.__struct_config__.tag) for part in (TextPart, ImageUrlPart))


def _explain(problem: str) -> InvalidRequest:
    """msgspec's words with the path as ``param``; what the client sent is not repeated, names apart."""
    match = _PROBLEM.fullmatch(problem)
    text, path = (match[1], match[2] or "") if match else (problem, "")
    named = _NAMED_FIELD.match(text)
    if named:
        path = f"{path}.{named[1]}" if path else named[1]
    text = _ECHO.sub("value not supported", text)
    if _PART_TYPE.fullmatch(path) and "value not supported" in text:
        text = f"this type of part is not served; {_PART_TYPES} are"
    code = "unknown_field" if "unknown field" in text else "invalid_value"
    where = path[:128] or None
    return InvalidRequest(f"{where or 'body'}: {text[:160]}", param=where, code=code)
