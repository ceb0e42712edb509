"""Every field of a request with values that matter, and what the witness's oracle makes of each.

Owns the table and the expected answers; asks nobody. A text's ids are its UTF-8 bytes, so that texts can
be worked out from ids without a tokenizer.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from PIL import Image

from shared.runner.witness_config import load_witness_config
from shared.runner.witness_oracle import Answer, WitnessOracle
from shared.types.request import SamplingParams
from tests.e2e.serving import WITNESS

CONFIG = load_witness_config(WITNESS)
ORACLE = WitnessOracle(CONFIG)
EOS, PICTURE = CONFIG.eos_token_id, CONFIG.image_token_id
MAX_MODEL_LEN = 2048
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

TEXT = "The quick brown fox jumps over the lazy dog, and then it goes on to jump over the fence as well."
ALWAYS_EOS = {str(EOS): 100}


class Case(NamedTuple):
    """One row: a request body, and what its fields mean to the model. ``pictures`` in prompt order;
    ``stop`` and ``include_stop`` are the router's part."""

    name: str
    path: str
    body: dict[str, Any]
    sampling: SamplingParams
    n: int = 1
    pictures: tuple[bytes, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop: bool = False


class Expected(NamedTuple):
    """What one choice must be. ``text`` None = not worked out here (it holds special tokens).
    ``logprobs``: chosen and top alternatives of each listed token; None = none asked for."""

    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str
    logprobs: list[tuple[float, tuple[float, ...]]] | None


def sampled(name: str, *, prompt: Any = TEXT, sent: Mapping[str, Any] | None = None, **fields: Any) -> Case:
    """A completion whose fields are called the same in the body and in SamplingParams; ``sent`` are those
    that the body has in another form."""
    fields = {"max_tokens": 24, "seed": 7, **fields}
    body = {**fields, **(sent or {}), "prompt": prompt}
    return Case(name, COMPLETIONS, body, SamplingParams(**fields))


def routed(name: str, sent: Mapping[str, Any], fields: Mapping[str, Any] | None = None, **more: Any) -> Case:
    """A completion with fields that the model does not see, beside those that it does."""
    seen = {"max_tokens": 24, "seed": 7, **(fields or {})}
    return Case(name, COMPLETIONS, {"prompt": TEXT, **seen, **sent}, SamplingParams(**seen), **more)


def chat(
    name: str, content: Sequence[str | bytes], sent: Mapping[str, Any] | None = None, **fields: Any
) -> Case:
    """A chat of one user turn, with pictures as bytes."""
    fields = {"max_tokens": 24, "seed": 7, **fields}
    logprobs = fields.get("logprobs")
    body: dict[str, Any] = {key: value for key, value in fields.items() if key != "logprobs"}
    if logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": logprobs}
    parts = [part_json(part) for part in content]
    body |= {"messages": [{"role": "user", "content": parts}], **(sent or {})}
    pictures = tuple(part for part in content if isinstance(part, bytes))
    return Case(name, CHAT, body, SamplingParams(**fields), pictures=pictures)


def part_json(part: str | bytes) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    url = "data:image/png;base64," + base64.b64encode(part).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def picture(width: int, height: int, colour: str) -> bytes:
    """A plain PNG."""
    out = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(out, "PNG")
    return out.getvalue()


def expected(case: Case, prompt: Sequence[int]) -> list[Expected]:
    """One entry a choice, for a prompt of these ids."""
    spans = list(_spans(case.pictures, prompt))
    answers = [
        ORACLE.generate(prompt, case.sampling, choice, spans, max_model_len=MAX_MODEL_LEN)
        for choice in range(case.n)
    ]
    return [_expected(case, answer) for answer in answers]


def _spans(pictures: Sequence[bytes], prompt: Sequence[int]) -> Any:
    """Each run of placeholders is one picture: the cases keep text between pictures."""
    offset = 0
    for data in pictures:
        while prompt[offset] != PICTURE:
            offset += 1
        end = offset
        while prompt[end] == PICTURE:
            end += 1
        yield offset, end - offset, data
        offset = end
    if PICTURE in prompt[offset:]:
        raise ValueError("more placeholders than pictures")


def _expected(case: Case, answer: Answer) -> Expected:
    ids, finish = answer.token_ids, answer.finish_reason
    closed = finish == "stop"
    hit = _stop_hit(case, ids[:-1] if closed else ids)
    if hit is not None:
        count, text = hit
        return Expected(ids[:count], text, "stop", _listed(case, answer, count))
    shown = ids[:-1] if closed else ids
    text = None if any(i >= 256 for i in shown) else bytes(shown).decode("utf-8", "replace")
    return Expected(ids, text, finish, _listed(case, answer, len(ids)))


def _stop_hit(case: Case, shown: Sequence[int]) -> tuple[int, str] | None:
    """The number of ids up to the one that completes a stop string, and the text that is left. One that is
    complete before ``min_tokens`` is plain text; of those complete at once the longest counts."""
    data = b""
    for count, token_id in enumerate(shown, 1):
        data += bytes([token_id]) if token_id < 256 else b""
        complete = [stop.encode() for stop in case.stop if data.endswith(stop.encode())]
        if complete and count > case.sampling.min_tokens:
            cut = 0 if case.include_stop else max(map(len, complete))
            return count, data[: len(data) - cut].decode("utf-8", "replace")
    return None


def _listed(case: Case, answer: Answer, count: int) -> list[tuple[float, tuple[float, ...]]] | None:
    if case.sampling.logprobs is None:
        return None
    return [(entry.logprob, entry.top_logprobs) for entry in answer.logprobs[:count]]
