from __future__ import annotations

from typing import Any

import pytest

from shared.api.openai import ApiCall, CallLabels, model_name, parse_chat, parse_completion
from shared.errors import ContextLengthExceeded, InvalidMedia, InvalidRequest, TriptychError
from shared.types.bounds import MAX_PARTS
from shared.types.inference import ImagePart, Message, ModelCard, TextPart

CARD = ModelCard(name="m", max_model_len=1000, vocab_size=500, created=1, vision=True)
USER = [{"role": "user", "content": "hi"}]


def read_image(url: str) -> bytes:
    if url == "bad":
        raise InvalidMedia("bad image")
    return url.encode()


def chat(card: ModelCard = CARD, **fields: Any) -> ApiCall:
    return parse_chat({"model": "m", "messages": USER} | fields, card, read_image, CallLabels())


def completion(**fields: Any) -> ApiCall:
    return parse_completion({"model": "m", "prompt": "p"} | fields, CARD, CallLabels())


def refused(call: Any, **fields: Any) -> TriptychError:
    with pytest.raises(TriptychError) as caught:
        call(**fields)
    assert caught.value.http_status == 400
    return caught.value


def test_every_sampling_field_arrives() -> None:
    call = chat(
        max_completion_tokens=7,
        max_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        n=3,
        stop=["a", "b"],
        seed=-5,
        logit_bias={"7": -100, "3": 1.5},
        presence_penalty=1,
        frequency_penalty=-2,
        repetition_penalty=1.2,
        stop_token_ids=[4],
        ignore_eos=True,
        min_tokens=2,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        cache_salt="s",
        priority=-3,
        request_id="mine",
        logprobs=True,
        top_logprobs=2,
    )
    (request,) = call.requests
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.0, 0.5, 0)
    assert (sampling.min_p, sampling.logit_bias, sampling.stop_token_ids) == (
        0.1,
        ((3, 1.5), (7, -100.0)),
        (4,),
    )
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (
        1,
        -2,
        1.2,
    )
    assert (sampling.ignore_eos, sampling.min_tokens, sampling.logprobs) == (True, 2, 2)
    assert (request.n, request.seed, request.stop, request.include_stop_str) == (3, -5, ("a", "b"), True)
    assert (request.skip_special_tokens, request.cache_salt, request.priority) == (False, "s", -3)
    assert (request.label, request.messages) == ("mine", (Message("user", (TextPart("hi"),)),))
    assert call.options.logprobs
    assert call.options.include_stop


def test_null_equals_absent() -> None:
    names = (
        "max_tokens temperature top_p n stop seed stream stream_options logprobs tools response_format user"
    )
    assert chat(**dict.fromkeys(names.split())) == chat()
    sampling = chat().requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.logprobs) == (
        0,
        1.0,
        1.0,
        None,
    )
    assert chat().requests[0].seed is None


def test_headers_name_the_call() -> None:
    fields = {"model": "m", "messages": USER, "request_id": "body"}
    (request,) = parse_chat(fields, CARD, read_image, CallLabels("header", "trace")).requests
    assert (request.label, request.traceparent) == ("header", "trace")


def test_fields_without_effect_are_accepted() -> None:
    ignored = {"user": "u", "metadata": {"a": 1}, "store": True, "service_tier": "auto", "tools": []}
    ignored |= {"response_format": {"type": "text"}, "tool_choice": "auto", "parallel_tool_calls": True}
    assert chat(**ignored) == chat()
    assert completion(echo=False, best_of=1, suffix="") == completion()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"),
        ("audio", {"voice": "x"}),
        ("modalities", ["audio"]),
        ("reasoning_effort", "low"),
        ("chat_template", "{{ x }}"),
        ("prompt_logprobs", 3),
        ("echo", True),
        ("best_of", 4),
    ],
)
def test_known_fields_not_served_yet_say_so(name: str, value: Any) -> None:
    for call in (chat, completion):
        error = refused(call, **{name: value})
        assert (error.param, error.code) == (name, "not_supported")
        assert "not supported yet" in error.message


@pytest.mark.parametrize("name", ["frobnicate", "kv_transfer_params", "bootstrap_host", "x" * 5000])
def test_an_unknown_field_is_named(name: str) -> None:
    error = refused(chat, **{name: 1})
    assert (error.param, error.code) == (name[:64], "unknown_field")
    assert len(error.message) < 200


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", [0, -1, 17, 10**9, 1.5, "1", True, [1]]),
        ("max_tokens", [0, -1, "5", 1.0]),
        ("temperature", [-1, 2.1, "1", True, [1]]),
        ("top_p", [0, -0.1, 1.1]),
        ("min_p", [-0.1, 2]),
        ("top_k", [-2, 0.5, 2**31]),
        ("presence_penalty", [-3, 100]),
        ("frequency_penalty", [2.5]),
        ("repetition_penalty", [0, -1, 3]),
        ("seed", [2**63, -(2**63) - 1, "1", 1.5]),
        ("stop", ["", [""], ["a"] * 5, "x" * 257, ["é" * 200], 5, [1]]),
        ("stop_token_ids", [[-1], [500], list(range(129)), ["1"], 5]),
        ("logit_bias", [{"a": 1}, {"500": 1}, {"-1": 1}, {"1": 101}, {"1": "x"}, {"²": 1}, []]),
        ("min_tokens", [-1, 1001, "1"]),
        ("stream", [1, "true"]),
        ("cache_salt", ["", "x" * 257, 1]),
        ("priority", ["high", 2**31]),
        ("logit_bias", [{str(i): 0 for i in range(2000)}]),
    ],
)
def test_numbers_and_sizes_out_of_range_name_their_field(name: str, values: list[Any]) -> None:
    for value in values:
        for call in (chat, completion):
            error = refused(call, **{name: value})
            assert error.param is not None
            assert error.param.startswith(name), value
            assert len(error.message) < 250


def test_a_length_beyond_the_context_has_its_own_code() -> None:
    for value in (1001, 10**12):
        with pytest.raises(ContextLengthExceeded):
            chat(max_tokens=value)
    assert refused(chat, max_tokens=3, min_tokens=4).param == "min_tokens"


def test_two_lengths_that_differ_are_refused_and_either_is_enough() -> None:
    assert refused(chat, max_tokens=9, max_completion_tokens=7).param == "max_tokens"
    for fields in ({"max_tokens": 7}, {"max_completion_tokens": 7}):
        assert chat(**fields).requests[0].sampling.max_tokens == 7


def test_logprobs_of_both_kinds() -> None:
    assert chat(logprobs=False).requests[0].sampling.logprobs is None
    assert chat(logprobs=True).requests[0].sampling.logprobs == 0
    assert completion(logprobs=0).options.logprobs
    assert completion(logprobs=3).requests[0].sampling.logprobs == 3
    assert refused(chat, top_logprobs=2).param == "top_logprobs"
    for value in (-1, 21, 10**6):
        assert refused(chat, logprobs=True, top_logprobs=value).param == "top_logprobs"
        assert refused(completion, logprobs=value).param == "logprobs"


def test_stream_options_need_a_stream() -> None:
    assert refused(chat, stream_options={"include_usage": True}).param == "stream_options"
    options = chat(stream=True, stream_options={"include_usage": True}).options
    assert (options.stream, options.include_usage, options.continuous_usage) == (True, True, False)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ({}, "messages"),
        ([1], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x", "magic": 1}], "messages[0].magic"),
        ([*USER, {"role": "assistant", "content": "", "tool_calls": [{}]}], "messages[1].tool_calls"),
        (
            [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "messages[0].content[0].image_url",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "bad"}}]}],
            "messages[0].content[0].image_url.url",
        ),
        (
            [{"role": "system", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0]",
        ),
    ],
)
def test_bad_messages_name_the_place(messages: Any, param: str) -> None:
    assert refused(chat, messages=messages).param == param


def test_an_odd_value_is_not_repeated() -> None:
    assert "SECRET" not in refused(chat, messages=[{"role": "user", "content": [{"type": "SECRET"}]}]).message


def test_what_is_not_known_is_told_what_is() -> None:
    part = refused(chat, messages=[{"role": "user", "content": [{"type": "video"}]}])
    assert "text and image_url" in part.message
    role = refused(chat, messages=[{"role": "wizard", "content": "x"}])
    assert "system, developer, user, assistant" in role.message


def test_parts_keep_their_order_and_roles_their_meaning() -> None:
    image = {"type": "image_url", "image_url": {"url": "u", "detail": "low"}}
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [image, {"type": "text", "text": "a"}, image], "name": "bob"},
        {"role": "assistant", "content": "", "tool_calls": None, "refusal": None, "audio": None},
    ]
    assert chat(messages=messages).requests[0].messages == (
        Message("system", (TextPart("d"),)),
        Message("user", (ImagePart(b"u"), TextPart("a"), ImagePart(b"u"))),
        Message("assistant", (TextPart(""),)),
    )


def test_a_text_model_takes_no_images() -> None:
    blind = ModelCard(name="m", max_model_len=10, vocab_size=10, created=1)
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]
    assert refused(chat, card=blind, messages=image).param == "messages[0].content[0]"


def test_the_four_shapes_of_prompt() -> None:
    def prompts(prompt: Any) -> list[Any]:
        return [
            r.prompt if r.prompt is not None else r.prompt_token_ids
            for r in completion(prompt=prompt).requests
        ]

    assert prompts("a") == ["a"]
    assert prompts(["a", "b"]) == ["a", "b"]
    assert prompts([1, 2]) == [(1, 2)]
    assert prompts([[1], [2, 3]]) == [(1,), (2, 3)]
    assert completion().requests[0].sampling.max_tokens == 16


@pytest.mark.parametrize(
    "prompt",
    ["", [], [""], [[]], ["a", ""], [-1], [500], [2**63], [1.5], [True], ["a", 1], [[["x"]]], 5, {}, [None]],
)
def test_a_bad_prompt_is_refused(prompt: Any) -> None:
    assert refused(completion, prompt=prompt).param == "prompt"


def test_choices_over_all_prompts_are_bounded() -> None:
    assert len(completion(prompt=["a"] * 16, n=4).requests) == 16
    assert refused(completion, prompt=["a"] * 17, n=4).param == "prompt"


def test_ids_over_the_context_are_refused_before_each_is_looked_at() -> None:
    for prompt in ([1] * 1001, [[1] * 1001], [1] * 1000 + ["x"]):
        with pytest.raises(ContextLengthExceeded) as caught:
            completion(prompt=prompt)
        assert caught.value.param == "prompt"
    assert len(completion(prompt=[1] * 1000).requests) == 1


def test_parts_over_all_messages_are_bounded() -> None:
    part = {"type": "text", "text": "a"}
    lists = [{"role": "user", "content": [part] * (MAX_PARTS // 2)}] * 2
    for messages in (USER * MAX_PARTS, lists):
        assert chat(messages=messages)
        error = refused(chat, messages=messages + USER)
        assert (error.param, "at most 8192 parts" in error.message) == ("messages", True)
    assert refused(chat, messages=[5, None, {"content": 5}]).param == "messages[0]"


@pytest.mark.parametrize("detail", ["auto", "low", "high", None])
def test_the_detail_of_a_picture_is_accepted(detail: str | None) -> None:
    image: dict[str, Any] = {"type": "image_url", "image_url": {"url": "u", "detail": detail}}
    assert chat(messages=[{"role": "user", "content": [image]}])
    image["image_url"]["detail"] = "medium"
    error = refused(chat, messages=[{"role": "user", "content": [image]}])
    assert error.param == "messages[0].content[0].image_url.detail" and "medium" not in error.message


@pytest.mark.parametrize("model", [None, "", 5, ["m"]])
def test_the_model_must_be_named(model: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        model_name({"model": model})
    assert caught.value.param == "model"
    assert model_name({"model": "m"}) == "m"
