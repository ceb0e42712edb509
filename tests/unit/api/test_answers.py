from __future__ import annotations

import json
import math
from typing import Any

import pytest

from shared.api.errors import error_headers, error_json
from shared.api.logprobs import CompletionLogprobs
from shared.api.openai import ResponseOptions
from shared.api.responses import AnswerForm, ChatCollector, CompletionCollector
from shared.api.sse import ChatChunks, ChunkWriter, CompletionChunks, error_event
from shared.errors import InvalidRequest, Overloaded, RateLimited, WorkerLost, all_errors
from shared.types.inference import Accepted, Delta, Output, Usage
from shared.types.request import TokenLogprobs

NAMES = {1: b"Hi", 2: b" \xe6\x97", 3: b"\xa5", 4: b"!", 9: b"<end>"}
ACCEPTED = Accepted(request_id="r1", prompt_token_ids=(7, 8, 9), seed=5, created=1234)


def lp(value: float, *tops: tuple[int, float]) -> TokenLogprobs:
    return TokenLogprobs(value, 0, tuple(t for t, _ in tops), tuple(v for _, v in tops))


#: Two choices; the first closes by an end token, the second by length.
BATCHES: list[list[Output]] = [
    [ACCEPTED],
    [
        Delta(0, "Hi", (1,), (lp(-0.5, (1, -0.5), (2, -1.0)),)),
        Delta(1, "", (2,), (lp(-1.5, (2, -1.5), (4, -math.inf)),)),
    ],
    [
        Delta(1, ' \u65e5"\n', (3,), (lp(-2.0, (3, -2.0)),)),
        Delta(0, "!", (4, 9), (lp(-0.1, (4, -0.1)), lp(-0.2, (9, -0.2))), "stop"),
    ],
    [Delta(1, "", (4,), (lp(-3.0, (4, -3.0)),), "length"), Usage(3, 6, 2)],
]


def form(**options: bool) -> AnswerForm:
    return AnswerForm('m"1', 2, ResponseOptions(**options), NAMES)


def events(writer: ChunkWriter, batches: list[list[Output]] = BATCHES) -> list[dict[str, Any]]:
    """The chunks of a whole stream, whose end is checked."""
    data = b"".join(writer.write(0, batch) for batch in batches) + writer.finish()
    lines = data.decode().split("\n\n")
    assert lines[-1] == ""
    assert lines[-2] == "data: [DONE]"
    assert all(line.startswith("data: ") and "\n" not in line for line in lines[:-1])
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def collected(collector: Any) -> dict[str, Any]:
    for batch in BATCHES:
        collector.add(0, batch)
    body: dict[str, Any] = json.loads(collector.finish())
    return body


def test_a_chat_stream_keeps_the_rules() -> None:
    chunks = events(ChatChunks(form()))
    assert {(c["id"], c["object"], c["created"], c["model"]) for c in chunks} == {
        ("chatcmpl-r1", "chat.completion.chunk", 1234, 'm"1')
    }
    assert not any("usage" in chunk for chunk in chunks)
    for index, text, reason in ((0, "Hi!", "stop"), (1, ' \u65e5"\n', "length")):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in mine[1:])
        assert "".join(choice["delta"].get("content", "") for choice in mine) == text
        assert (mine[-1]["delta"], mine[-1]["finish_reason"]) == ({}, reason)
        assert all(choice["finish_reason"] is None for choice in mine[:-1])


def test_held_text_makes_no_chunk() -> None:
    writer = ChatChunks(form())
    writer.write(0, [ACCEPTED])
    assert writer.write(0, [Delta(0, "", (1,))]) == b""


def test_usage_comes_last_and_only_when_asked() -> None:
    chunks = events(ChatChunks(form(include_usage=True)))
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_running_usage_counts_tokens_so_far() -> None:
    chunks = events(ChatChunks(form(include_usage=True, continuous_usage=True)))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[:2] == [0, 0]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {3}


def test_running_usage_says_what_was_cached_once_that_is_known() -> None:
    chunks = events(ChatChunks(form(include_usage=True, continuous_usage=True)))
    details = [chunk["usage"]["prompt_tokens_details"] for chunk in chunks]
    # Known with the last tokens, whose chunk comes before the one with usage alone.
    assert details == [None] * (len(chunks) - 2) + [{"cached_tokens": 2}] * 2
    assert chunks[-2]["usage"] == chunks[-1]["usage"]


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_stream_adds_up_to_the_whole_answer(kind: str) -> None:
    options = {"logprobs": True, "return_token_ids": True}
    if kind == "chat":
        chunks = events(ChatChunks(form(**options)))
        body = collected(ChatCollector(form(**options)))
        assert chunks[0]["prompt_token_ids"] == body["prompt_token_ids"] == [7, 8, 9]
        assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    else:
        chunks = events(CompletionChunks(form(**options)))
        body = collected(CompletionCollector(form(**options)))
        assert (
            chunks[0]["choices"][0]["prompt_token_ids"] == body["choices"][0]["prompt_token_ids"] == [7, 8, 9]
        )
    for whole in body["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == whole["index"]]
        assert [i for choice in mine for i in choice.get("token_ids", [])] == whole["token_ids"]
        assert mine[-1]["finish_reason"] == whole["finish_reason"]
        parts = [choice["logprobs"] for choice in mine if choice["logprobs"]]
        for name in whole["logprobs"]:
            if whole["logprobs"][name] is not None:
                assert [x for part in parts for x in part[name]] == whole["logprobs"][name]
        if kind == "chat":
            assert "".join(c["delta"].get("content", "") for c in mine) == whole["message"]["content"]
        else:
            assert "".join(choice["text"] for choice in mine) == whole["text"]
    assert body["choices"][0]["token_ids"] == [1, 4, 9]
    assert (
        len(body["choices"][0]["logprobs"].get("content", body["choices"][0]["logprobs"].get("tokens"))) == 3
    )


def test_listed_tokens_joined_are_the_text() -> None:
    body = collected(ChatCollector(form(logprobs=True)))
    assert body["object"] == "chat.completion"
    for choice in body["choices"][:1]:
        content = choice["logprobs"]["content"]
        assert bytes(b for entry in content for b in entry["bytes"]).decode() == choice["message"]["content"]
    second = body["choices"][1]["logprobs"]["content"]
    assert bytes(b for entry in second for b in entry["bytes"]).decode() == " \u65e5!"
    assert second[0]["token"] == " \ufffd"
    assert second[0]["top_logprobs"][1] == {"token": "!", "logprob": -9999.0, "bytes": [33]}
    assert (body["choices"][0]["logprobs"]["content"][0]["logprob"], body["usage"]["total_tokens"]) == (
        -0.5,
        9,
    )


def test_a_completion_lists_four_parallel_columns() -> None:
    first, second = collected(CompletionCollector(form(logprobs=True)))["choices"]
    assert first["text"] == "Hi!"
    assert first["logprobs"] == {
        "text_offset": [0, 2],
        "token_logprobs": [-0.5, -0.1],
        "tokens": ["Hi", "!"],
        "top_logprobs": [{"Hi": -0.5, "bytes:\\x20\\xe6\\x97": -1.0}, {"!": -0.1}],
    }
    assert second["logprobs"]["tokens"] == ["bytes:\\x20\\xe6\\x97", "bytes:\\xa5", "!"]
    assert second["logprobs"]["text_offset"] == [0, 1, 2]


def test_offsets_go_on_over_parts() -> None:
    listing, logprobs = CompletionLogprobs(), (lp(0.0),)
    offsets = [listing.part((i,), logprobs, NAMES)["text_offset"][0] for i in (1, 2, 3, 4)]
    assert offsets == [0, 2, 3, 4]


def test_a_stop_string_is_reported_and_its_tokens_kept() -> None:
    batches: list[list[Output]] = [
        [ACCEPTED],
        [Delta(0, "H", (1,), (lp(-1.0),), "stop", "i"), Delta(1, "x", (4,), (lp(-1.0),), "stop", 4)],
        [Usage(3, 2)],
    ]
    last = [
        c["choices"][0]
        for c in events(ChatChunks(form(logprobs=True)), batches)
        if c["choices"][0]["finish_reason"]
    ]
    assert [choice["stop_reason"] for choice in last] == ["i", 4]
    collector = ChatCollector(form(logprobs=True))
    for batch in batches:
        collector.add(0, batch)
    by_string, by_id = json.loads(collector.finish())["choices"]
    assert [entry["token"] for entry in by_string["logprobs"]["content"]] == ["Hi"]
    assert by_id["logprobs"]["content"] == []


def test_several_prompts_share_one_answer() -> None:
    other = Accepted(request_id="r2", prompt_token_ids=(1,), seed=5, created=9)
    arrivals: list[tuple[int, Output]] = [(1, other), (0, ACCEPTED)]
    arrivals += [(p, Delta(c, f"{p}{c}", (1,), (), "length")) for c in (1, 0) for p in (1, 0)]
    arrivals += [(0, Usage(3, 2, 1)), (1, Usage(1, 2, 0))]
    collector, writer = CompletionCollector(form()), CompletionChunks(form(include_usage=True))
    data = b""
    for prompt, output in arrivals:
        collector.add(prompt, [output])
        data += writer.write(prompt, [output])
    body = json.loads(collector.finish())
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "00"), (1, "01"), (2, "10"), (3, "11")]
    assert body["usage"]["prompt_tokens"] == 4
    chunks = [
        json.loads(e.removeprefix("data: ")) for e in (data + writer.finish()).decode().split("\n\n")[:-2]
    ]
    assert {c["id"] for c in chunks} == {"cmpl-r2"}
    assert {
        c["choices"][0]["index"]: c["choices"][0]["text"]
        for c in chunks
        if c["choices"] and c["choices"][0]["text"]
    } == {
        0: "00",
        1: "01",
        2: "10",
        3: "11",
    }
    assert chunks[-1]["usage"]["completion_tokens"] == 4


def test_every_error_has_an_openai_body() -> None:
    for cls in all_errors():
        error = json.loads(error_json(cls("why", param="p")))["error"]
        assert error == {"message": "why", "type": cls.type, "param": "p", "code": cls.code}
        assert isinstance(error["code"], str)


def test_a_broken_stream_says_so_at_top_level() -> None:
    event = error_event(WorkerLost("gone"))
    assert event.endswith(b"\n\n")
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "worker_lost"


def test_clients_learn_when_to_try_again() -> None:
    for error in (Overloaded("x"), RateLimited("x"), WorkerLost("x")):
        assert error_headers(error) == {"retry-after": "1"}
    assert error_headers(InvalidRequest("x")) == {}
