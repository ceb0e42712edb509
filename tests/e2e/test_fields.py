"""Every field of a request: phases apart, one worker alone and the oracle give the same answer."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest

from tests.e2e.fields import (
    ALWAYS_EOS,
    CHAT,
    COMPLETIONS,
    EOS,
    TEXT,
    Case,
    Expected,
    chat,
    expected,
    picture,
    routed,
    sampled,
)
from tests.e2e.serving import Serving

pytestmark = pytest.mark.e2e

#: JSON has no infinity: what an impossible token's log-probability is written as.
FLOOR = -9999.0
RED, BLUE = picture(64, 32, "red"), picture(100, 130, "blue")
#: TEXT is answered with these bytes, among others: 90 first, 99 third and fourth, 90 again as the twelfth.
Z, C, C_TWICE = "Z", "c", "cc"

CASES = [
    sampled("greedy", temperature=0.0),
    sampled("cool", temperature=0.3),
    sampled("hot", temperature=2.0),
    sampled("temperature of zero with a seed", temperature=0.0, seed=5),
    sampled("top_k of one", top_k=1),
    sampled("top_k", top_k=3, temperature=1.5),
    sampled("top_k off", sent={"top_k": -1}),
    sampled("top_p", top_p=0.5, temperature=1.5),
    sampled("top_p of next to nothing", top_p=1e-6),
    sampled("min_p", min_p=0.3, temperature=1.5),
    sampled("all truncations at once", top_k=5, top_p=0.8, min_p=0.05, temperature=1.2),
    sampled("seed of zero", seed=0),
    sampled("negative seed", seed=-1),
    sampled("largest seed", seed=(1 << 63) - 1),
    sampled("presence penalty", presence_penalty=2.0, max_tokens=60),
    sampled("negative presence penalty", presence_penalty=-2.0, temperature=0.0, max_tokens=60),
    sampled("frequency penalty", frequency_penalty=1.5, max_tokens=60),
    sampled("repetition penalty", repetition_penalty=1.9, temperature=0.0, max_tokens=60),
    sampled("repetition reward", repetition_penalty=0.2, temperature=0.0, max_tokens=60),
    sampled("all penalties", presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.3),
    sampled(
        "logit bias for", sent={"logit_bias": {"65": 6.5, "66": 100}}, logit_bias=((65, 6.5), (66, 100.0))
    ),
    sampled("logit bias against", sent={"logit_bias": {"90": -100}}, logit_bias=((90, -100.0),)),
    sampled("end at the first token", sent={"logit_bias": ALWAYS_EOS}, logit_bias=((EOS, 100.0),)),
    sampled("end ignored", sent={"logit_bias": ALWAYS_EOS}, logit_bias=((EOS, 100.0),), ignore_eos=True),
    sampled("end held off", sent={"logit_bias": ALWAYS_EOS}, logit_bias=((EOS, 100.0),), min_tokens=9),
    sampled("min_tokens of max_tokens", min_tokens=24),
    sampled("long, to its own end", max_tokens=400),
    sampled("long, past every end", max_tokens=300, ignore_eos=True),
    sampled("stop id first", stop_token_ids=(90,)),
    sampled("stop ids", stop_token_ids=(200, 99)),
    sampled("stop id held off", stop_token_ids=(90,), min_tokens=5),
    sampled("one token", max_tokens=1),
    sampled("two tokens", max_tokens=2),
    sampled("logprobs of the chosen", logprobs=0),
    sampled("logprobs", logprobs=1, temperature=1.5),
    sampled("most logprobs", logprobs=20, repetition_penalty=1.5, temperature=0.7),
    sampled("logprobs to the end", logprobs=2, max_tokens=400),
    sampled("prompt of one token", prompt=[65]),
    sampled("prompt of a block less one", prompt=[65] * 15),
    sampled("prompt of one block", prompt=[66] * 16),
    sampled("prompt of one block and one", prompt=[67] * 17),
    sampled("prompt of many blocks", prompt=TEXT * 12),
    routed("three choices", {"n": 3}, n=3),
    routed("most choices", {"n": 16}, {"temperature": 2.0, "max_tokens": 5}, n=16),
    routed("choices that end at once", {"n": 3}, {"max_tokens": 1}, n=3),
    routed("choices with logprobs", {"n": 2}, {"logprobs": 3}, n=2),
    routed("stop string", {"stop": C_TWICE}, stop=(C_TWICE,)),
    routed(
        "stop string kept", {"stop": [C], "include_stop_str_in_output": True}, stop=(C,), include_stop=True
    ),
    routed("stop string at once", {"stop": [Z, C]}, stop=(Z, C)),
    routed("several stop strings", {"stop": ["never", C_TWICE, "ccc"]}, stop=("never", C_TWICE, "ccc")),
    routed("stop string held off", {"stop": [Z]}, {"min_tokens": 5}, stop=(Z,)),
    routed("stop string with logprobs", {"stop": [C_TWICE]}, {"logprobs": 2}, stop=(C_TWICE,)),
    routed("cache salt", {"cache_salt": "grain"}),
    routed("low priority", {"priority": 1 << 30}),
    routed("high priority", {"priority": -(1 << 31)}),
    routed("special tokens shown", {"skip_special_tokens": False}, {"max_tokens": 300, "ignore_eos": True}),
    routed("labels", {"request_id": "mine", "user": "me", "metadata": {"a": "b"}}),
    chat("chat", ["What is this?"]),
    chat("chat with logprobs", ["What is this?"], logprobs=4),
    chat("chat by its newer limit", ["Hello"], {"max_completion_tokens": 24}),
    chat("picture", [RED, "What is this?"]),
    chat("picture with everything", [RED, TEXT], temperature=1.4, top_k=4, logprobs=3, presence_penalty=1.0),
    chat("two pictures", [RED, "and", BLUE, "differ"]),
    chat("the same picture twice", [BLUE, "and", BLUE]),
    chat("picture of many blocks in", [TEXT * 3, RED, TEXT]),
    chat("picture under a salt", [RED, "salted"], {"cache_salt": "grain"}),
]


async def answer_of(serving: Serving, case: Case, **more: Any) -> dict[str, Any]:
    """The whole answer, without what is different each time."""
    body = {"model": serving.model, "return_token_ids": True, **case.body, **more}
    async with serving.client() as http:
        response = await http.post(case.path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    for name in ("id", "created"):
        del answer[name]
    cached = answer["usage"].pop("prompt_tokens_details")["cached_tokens"]
    assert 0 <= cached <= answer["usage"]["prompt_tokens"]
    return answer


async def streamed_answer_of(serving: Serving, case: Case) -> list[tuple[str, list[int], str]]:
    """Text, ids and finish reason of each choice, as they come in a stream."""
    body = {"model": serving.model, "return_token_ids": True, **case.body, "stream": True}
    texts, ids, finishes = ([""] * case.n, [[] for _ in range(case.n)], [""] * case.n)
    async with serving.client() as http, http.stream("POST", case.path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            for choice in event["choices"]:
                index = choice["index"]
                delta = choice.get("delta", {}).get("content") or choice.get("text") or ""
                texts[index] += delta
                ids[index] += choice.get("token_ids") or ()
                finishes[index] += choice["finish_reason"] or ""
    return list(zip(texts, ids, finishes, strict=True))


def listed(choice: dict[str, Any]) -> list[tuple[float, list[float]]] | None:
    """Log-probabilities of either form: the chosen token's, and the alternatives' from the top."""
    listing = choice["logprobs"]
    if listing is None:
        return None
    if "content" in listing:
        return [
            (entry["logprob"], [top["logprob"] for top in entry["top_logprobs"]])
            for entry in listing["content"]
        ]
    tops = [sorted(top.values(), reverse=True) for top in listing["top_logprobs"]]
    return list(zip(listing["token_logprobs"], tops, strict=True))


def check(choice: dict[str, Any], want: Expected) -> None:
    assert tuple(choice["token_ids"]) == want.token_ids
    assert choice["finish_reason"] == want.finish_reason
    if want.text is not None:
        assert text_of(choice) == want.text
    got = listed(choice)
    assert (got is None) == (want.logprobs is None)
    if got is None or want.logprobs is None:
        return
    assert len(got) == len(want.logprobs)
    for (logprob, tops), (right, right_tops) in zip(got, want.logprobs, strict=True):
        assert [logprob, *tops] == pytest.approx([max(v, FLOOR) for v in (right, *right_tops)], abs=1e-9)


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
async def test_apart_is_alone_is_the_oracle(witness: Serving, witness_alone: Serving, case: Case) -> None:
    apart, alone, streamed = await asyncio.gather(
        answer_of(witness, case), answer_of(witness_alone, case), streamed_answer_of(witness, case)
    )
    assert apart == alone
    prompt = apart.get("prompt_token_ids") or apart["choices"][0]["prompt_token_ids"]
    choices = apart["choices"]
    for choice, want in zip(choices, expected(case, prompt), strict=True):
        check(choice, want)
    assert streamed == [(text_of(c), c["token_ids"], c["finish_reason"]) for c in choices]
    count = sum(len(choice["token_ids"]) for choice in choices)
    assert apart["usage"]["completion_tokens"] == count
    assert apart["usage"]["prompt_tokens"] == len(prompt)


def test_the_table_covers_every_field() -> None:
    """A field that is served but not asked for here would go unnoticed."""
    from shared.api.schema import ChatBody, CompletionBody

    form = {"model", "messages", "prompt", "stream", "stream_options", "return_token_ids"}
    asked = {name for case in CASES for name in case.body}
    assert set(ChatBody.__struct_fields__) | set(CompletionBody.__struct_fields__) <= asked | form


def test_the_stops_of_the_table_really_come() -> None:
    """Otherwise the cases with stops would test nothing."""
    found = {case.name: expected(case, tuple(TEXT.encode()))[0] for case in CASES if case.stop}
    assert {name: len(want.token_ids) for name, want in found.items()} == {
        "stop string": 4,
        "stop string kept": 3,
        "stop string at once": 1,
        "several stop strings": 4,
        "stop string held off": 12,
        "stop string with logprobs": 4,
    }
    assert all(want.finish_reason == "stop" for want in found.values())


async def test_prompts_of_one_call_are_answered_as_if_alone(witness: Serving, witness_alone: Serving) -> None:
    prompts = [TEXT, "Another prompt", TEXT[:30]]
    many = routed("many", {"prompt": prompts, "n": 2}, n=2)
    apart, alone = await answer_of(witness, many), await answer_of(witness_alone, many)
    assert apart == alone
    for index, prompt in enumerate(prompts):
        single = await answer_of(witness, routed("one", {"prompt": prompt, "n": 2}, n=2))
        for choice, want in zip(apart["choices"][2 * index : 2 * index + 2], single["choices"], strict=True):
            assert choice["token_ids"] == want["token_ids"] and choice["text"] == want["text"]


async def test_a_prompt_is_the_same_as_text_and_as_ids(witness: Serving) -> None:
    text = await answer_of(witness, routed("text", {"prompt": TEXT}))
    ids = await answer_of(witness, routed("ids", {"prompt": list(TEXT.encode())}))
    assert text == ids


async def test_salts_do_not_share_blocks(witness: Serving) -> None:
    prompt = "The prefix that is looked up under one salt and under another. " * 3

    async def cached(salt: str) -> int:
        body = {"model": witness.model, "prompt": prompt, "max_tokens": 2, "cache_salt": salt}
        async with witness.client() as http:
            response = await http.post(COMPLETIONS, json=body)
        tokens: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tokens

    assert [await cached("a"), await cached("a"), await cached("b")] == [0, len(prompt) // 16 * 16, 0]


async def test_every_case_left_nothing_behind(witness: Serving, witness_alone: Serving) -> None:
    assert await witness.at_rest() == {}
    assert await witness_alone.at_rest() == {}


def test_chat_and_completions_are_both_in_the_table() -> None:
    assert {case.path for case in CASES} == {CHAT, COMPLETIONS}
    assert not math.isnan(FLOOR)
