"""The bounds of a client request, judged on the record that every front end makes."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from shared.errors import ContextLengthExceeded, InvalidRequest
from shared.types.bounds import check_picture, check_request, unknown_model
from shared.types.inference import ImagePart, InferenceRequest, Message, ModelCard, TextPart
from shared.types.request import SamplingParams

CARD = ModelCard("m", max_model_len=100, vocab_size=50, created=1, vision=True)
BLIND = msgspec.structs.replace(CARD, vision=False)
PICTURE = (TextPart("look:"), ImagePart(b"png"))


def ask(sampling: dict[str, Any] | None = None, **fields: Any) -> InferenceRequest:
    source = {} if {"messages", "prompt_token_ids"} & fields.keys() else {"prompt": "p"}
    return InferenceRequest("m", SamplingParams(**{"max_tokens": 4, **(sampling or {})}), **(source | fields))


def refused(request: InferenceRequest, card: ModelCard = CARD) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        check_request(request, card)
    return caught.value


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 16},
        {"stop": ("x" * 256, "é" * 128, "a", "b")},
        {"cache_salt": "x" * 256},
        {"label": "x" * 128},
        {"deadline_s": 0.001},
        {"prompt_token_ids": (0, 49)},
        {"messages": (Message("user", PICTURE),)},
        {"sampling": {"max_tokens": 0, "min_tokens": 100}},
        {"sampling": {"max_tokens": 100, "temperature": 2, "top_p": 1, "min_p": 1, "repetition_penalty": 2}},
        {"sampling": {"presence_penalty": -2, "frequency_penalty": 2, "logprobs": 20}},
        {"sampling": {"logit_bias": ((0, -100.0), (49, 100.0)), "stop_token_ids": (0,) * 128}},
    ],
)
def test_what_lies_within(fields: dict[str, Any]) -> None:
    check_request(ask(**fields), CARD)


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("n", {"n": 0}),
        ("n", {"n": 17}),
        ("stop", {"stop": ("a",) * 5}),
        ("stop", {"stop": ("",)}),
        ("stop", {"stop": ("é" * 129,)}),
        ("cache_salt", {"cache_salt": "x" * 257}),
        ("label", {"label": "x" * 129}),
        ("deadline_s", {"deadline_s": 0.0}),
        ("deadline_s", {"deadline_s": math.nan}),
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt_token_ids": ()}),
        ("prompt", {"prompt_token_ids": (1, 50)}),
        (None, {"messages": (Message("user", PICTURE),), "prompt": "p"}),
        ("messages[1].content[1]", {"messages": (Message("user", PICTURE), Message("system", PICTURE))}),
        ("messages[0].content[1]", {"messages": (Message("assistant", PICTURE),)}),
        ("min_tokens", {"sampling": {"min_tokens": 5}}),
        ("min_tokens", {"sampling": {"max_tokens": 0, "min_tokens": 101}}),
        *(
            (field, {"sampling": {field: value}})
            for field, values in {
                "max_tokens": (-1,),
                "temperature": (-0.1, 2.1, math.nan, math.inf),
                "top_p": (0, 1.1, math.nan),
                "min_p": (-0.1, 1.1),
                "repetition_penalty": (0, 2.1),
                "presence_penalty": (-2.1, math.nan),
                "frequency_penalty": (2.1,),
                "logprobs": (21, -1),
                "stop_token_ids": ((50,), (-1,), (1,) * 129),
                "logit_bias": (((50, 1.0),), ((1, 101.0),), ((1, math.nan),), ((1, 1.0),) * 1025),
            }.items()
            for value in values
        ),
    ],
)
def test_what_lies_outside_is_refused_by_name(param: str | None, fields: dict[str, Any]) -> None:
    error = refused(ask(**fields))
    assert (error.param, error.code) == (param, "invalid_value")
    assert param is None or 10 < len(error.message) < 120


def test_more_tokens_than_the_context_have_a_code_of_their_own() -> None:
    error = refused(ask({"max_tokens": 101}))
    assert isinstance(error, ContextLengthExceeded) and error.param == "max_tokens"
    assert "100" in error.message


def test_more_of_a_prompt_than_is_looked_at_is_refused() -> None:
    assert refused(ask(prompt_token_ids=(1,) * 101)).code == "context_length_exceeded"
    messages = (Message("user", (TextPart("a"),) * 4096),) * 2
    check_request(ask(messages=messages), CARD)
    assert refused(ask(messages=(*messages, Message("user", (TextPart("a"),))))).param == "messages"


def test_the_bounds_are_said() -> None:
    assert refused(ask(n=17)).message == "n must be between 1 and 16"
    assert refused(ask({"top_p": 0})).message == "top_p must be above 0 and at most 1"
    assert "at most 4" in refused(ask(stop=("a",) * 5)).message


def test_pictures_that_nobody_encodes_are_refused_plainly() -> None:
    error = refused(ask(messages=(Message("user", PICTURE),)), BLIND)
    assert (error.param, error.code) == ("messages[0].content[1]", "not_supported")
    assert "no encoder" in error.message
    check_request(ask(messages=(Message("user", PICTURE[:1]),)), BLIND)
    check_picture("user", CARD, "x")


def test_a_model_that_is_not_served_is_told_which_are() -> None:
    assert unknown_model(["b", "a"]).message.endswith(": a, b")
    many = unknown_model(f"m{i:02}" for i in range(50)).message
    assert "m07, ..." in many and "m08" not in many
    assert "none" in unknown_model([]).message
