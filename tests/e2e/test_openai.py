"""OpenAI's own client against real processes: forms of answers, stops, choices, and leaving early."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from shared.text.tokenizer import Tokenizer
from tests.e2e.serving import Serving

pytestmark = pytest.mark.e2e

USER = [{"role": "user", "content": "Say something."}]
TEXT_VOCAB_SIZE = 49152
SEEDED: dict[str, Any] = {"seed": 3, "temperature": 0.9}


@pytest.fixture
async def client(witness: Serving) -> AsyncIterator[openai.AsyncOpenAI]:
    http = httpx.AsyncClient(trust_env=False, timeout=60)
    async with openai.AsyncOpenAI(
        base_url=f"{witness.url}/v1", api_key="unused", http_client=http, max_retries=0
    ) as made:
        yield made


async def test_the_model_is_listed(client: openai.AsyncOpenAI) -> None:
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == ["witness"]
    model = await client.models.retrieve("witness")
    assert model.model_extra is not None and model.model_extra["max_model_len"] == 2048
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nobody")


async def test_a_chat_is_the_same_streamed_and_whole(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="witness", messages=USER, max_tokens=1000, **SEEDED)
    async with client.chat.completions.stream(
        model="witness", messages=USER, max_tokens=1000, stream_options={"include_usage": True}, **SEEDED
    ) as stream:
        deltas = [event.delta async for event in stream if event.type == "content.delta"]
        streamed = await stream.get_final_completion()
    assert whole.choices[0].message.content == "".join(deltas) == streamed.choices[0].message.content
    assert whole.choices[0].message.role == streamed.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == streamed.choices[0].finish_reason == "stop"
    assert whole.usage is not None and streamed.usage is not None
    assert whole.usage.prompt_tokens == streamed.usage.prompt_tokens > 0
    assert whole.usage.completion_tokens == streamed.usage.completion_tokens
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


async def test_a_completion_is_the_same_streamed_and_whole(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "witness", "prompt": "Once upon a time", "max_tokens": 40, **SEEDED}
    whole = await client.completions.create(**asked)
    parts = [part async for part in await client.completions.create(**asked, stream=True)]
    assert whole.choices[0].text == "".join(p.choices[0].text for p in parts)
    reasons = [part.choices[0].finish_reason for part in parts if part.choices[0].finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    assert len({part.id for part in parts}) == 1 and all(part.usage is None for part in parts)


async def test_usage_comes_last_and_only_when_asked_for(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="witness", messages=USER, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 5


async def test_logprobs_spell_the_text(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(
        model="witness", messages=USER, max_tokens=30, logprobs=True, top_logprobs=4, temperature=0
    )
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and whole.usage is not None
    spelled = bytes(byte for entry in logprobs.content for byte in entry.bytes or [])
    assert spelled.decode("utf-8", "replace") == whole.choices[0].message.content
    assert len(logprobs.content) == whole.usage.completion_tokens
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 4
        assert entry.logprob == entry.top_logprobs[0].logprob == max(t.logprob for t in entry.top_logprobs)
        assert entry.bytes == entry.top_logprobs[0].bytes


async def test_choices_differ_and_are_counted_together(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(
        model="witness", messages=USER, n=4, max_tokens=20, extra_body={"ignore_eos": True}, **SEEDED
    )
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in whole.choices}) == 4
    assert whole.usage is not None and whole.usage.completion_tokens == 80
    stream = await client.chat.completions.create(
        model="witness",
        messages=USER,
        n=4,
        max_tokens=20,
        stream=True,
        extra_body={"ignore_eos": True},
        **SEEDED,
    )
    texts = [""] * 4
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


async def test_the_same_seed_gives_the_same_answer_and_no_seed_another(client: openai.AsyncOpenAI) -> None:
    async def text(**fields: Any) -> str | None:
        whole = await client.chat.completions.create(
            model="witness", messages=USER, max_tokens=30, extra_body={"ignore_eos": True}, **fields
        )
        return whole.choices[0].message.content

    assert await text(seed=5) == await text(seed=5) != await text(seed=6)
    assert await text() != await text()


async def test_errors_are_the_clients_own_classes(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="nobody", messages=USER)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="witness", messages=[])
    assert (bad.value.code, bad.value.param) == ("invalid_value", "messages")


async def test_the_demo_knows_the_capital_of_france(demo: Serving) -> None:
    http = httpx.AsyncClient(trust_env=False, timeout=120)
    async with openai.AsyncOpenAI(
        base_url=f"{demo.url}/v1", api_key="unused", http_client=http, max_retries=0
    ) as client:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        whole = await client.chat.completions.create(
            model=demo.model, messages=question, temperature=0, max_completion_tokens=16
        )
    assert whole.choices[0].message.content is not None and "Paris" in whole.choices[0].message.content


async def test_padding_rows_are_never_sampled_nor_listed(demo: Serving) -> None:
    """The demo's vocabulary is padded for its picture placeholder; nobody may see the padding."""
    tokenizer = Tokenizer.load(Path(demo.model_dir))
    spelled = {tokenizer.token_bytes(token_id) for token_id in range(TEXT_VOCAB_SIZE)}
    asked = {
        "model": demo.model,
        "messages": USER,
        "max_tokens": 12,
        "temperature": 2,
        "seed": 4,
        "n": 6,
        "logprobs": True,
        "top_logprobs": 20,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    async with demo.client() as http:
        answer = (await http.post("/v1/chat/completions", json=asked)).json()
    for choice in answer["choices"]:
        assert max(choice["token_ids"]) < TEXT_VOCAB_SIZE
        for entry in choice["logprobs"]["content"]:
            assert len(entry["top_logprobs"]) == 20
            assert {bytes(top["bytes"]) for top in entry["top_logprobs"]} <= spelled


# Stop strings.


async def test_a_stop_string_is_cut_exactly_and_ends_the_work(demo: Serving) -> None:
    """Steps of real weights are slow enough to count those that came after the stop."""
    asked = {
        "model": demo.model,
        "prompt": "The alphabet is a, b, c, d,",
        "temperature": 0,
        "ignore_eos": True,
    }
    async with demo.client() as http:
        text = (await _post(http, {**asked, "max_tokens": 14}))["choices"][0]["text"]
        stop = next(text[i:] for i in range(len(text) - 2, 0, -1) if text.find(text[i:]) == i)
        wasted = []
        for stream in (False, True, False):
            before = await _decode_steps(demo)
            answer = await _post(http, {**asked, "max_tokens": 200, "stop": [stop], "stream": stream})
            assert answer["choices"][0]["text"] == text[: -len(stop)]
            assert answer["choices"][0]["finish_reason"] == "stop"
            assert answer["choices"][0]["stop_reason"] == stop
            steps = await _decode_steps(demo) - before
            # The first token is the prefill worker's.
            wasted.append(steps - (answer["usage"]["completion_tokens"] - 1))
    # A neighbour on the machine may hold one up, but not all.
    assert 0 <= min(wasted) <= 2


async def _decode_steps(demo: Serving) -> int:
    assert await demo.at_rest() == {}
    return sum(int(demo.metrics(name).value("triptych_steps_total")) for name in ("decode-0", "decode-1"))


async def _post(http: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """The whole answer, put together here when it is streamed."""
    if not body.get("stream"):
        answer: dict[str, Any] = (await http.post("/v1/completions", json=body)).json()
        return answer
    choice: dict[str, Any] = {"text": ""}
    usage = None
    body = {**body, "stream_options": {"include_usage": True}}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event["usage"] or usage
            for part in event["choices"]:
                choice["text"] += part["text"]
                choice |= {key: part[key] for key in ("finish_reason", "stop_reason") if part.get(key)}
    return {"choices": [choice], "usage": usage}


# Clients that leave.

ENDLESS: dict[str, Any] = {"model": "witness", "prompt": "x" * 100, "max_tokens": 1900, "ignore_eos": True}


@pytest.mark.parametrize("n", [2, 16])
async def test_leaving_a_stream_frees_everything_everywhere(witness: Serving, n: int) -> None:
    before = witness.metrics("router")
    async with witness.client() as http:
        body = {**ENDLESS, "stream": True, "n": n, "temperature": 1.5}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            for _ in range(6):
                await anext(lines)
    assert await witness.at_rest() == {}
    after = witness.metrics("router")
    assert _aborted(after) - _aborted(before) == 1


async def test_leaving_before_the_answer_frees_everything_everywhere(witness: Serving) -> None:
    before = witness.metrics("router")
    async with witness.client() as http:
        asking = asyncio.create_task(http.post("/v1/completions", json={**ENDLESS, "n": 16}))
        while not witness.metrics("router").value("triptych_requests_running"):
            await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.wait([asking])
    assert await witness.at_rest() == {}
    assert _aborted(witness.metrics("router")) - _aborted(before) == 1


async def test_many_that_leave_at_once_disturb_nobody(witness: Serving) -> None:
    async with witness.client() as http:

        async def leave() -> None:
            async with http.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as response:
                await anext(response.aiter_lines())

        async def stay() -> str:
            body = {**ENDLESS, "max_tokens": 60, "seed": 1}
            text: str = (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
            return text

        alone = await stay()
        results = await asyncio.gather(*(stay() if i % 3 == 0 else leave() for i in range(18)))
    assert [result for result in results if result is not None] == [alone] * 6
    assert await witness.at_rest() == {}


def _aborted(samples: Any) -> int:
    return int(samples.value("triptych_requests_total", outcome="aborted"))
