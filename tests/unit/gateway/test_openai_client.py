"""The gateway as OpenAI's own client sees it, whose streaming helpers are the strictest reader."""

from __future__ import annotations

import base64

import openai
import pytest

from shared.errors import ContextLengthExceeded, Overloaded, WorkerLost
from tests.unit.gateway.scripted import WORDS, ScriptedService
from tests.unit.multimodal.pictures import picture

TEXT = "".join(WORDS)
USER = [{"role": "user", "content": "hi"}]


async def test_a_chat_completion(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    answer = await client.chat.completions.create(
        model="tiny", messages=USER, n=2, logprobs=True, top_logprobs=2, extra_body={"return_token_ids": True}
    )
    assert [choice.message.content for choice in answer.choices] == [TEXT, TEXT]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    assert answer.id == "chatcmpl-r1"
    assert (answer.created, answer.model) == (1700000005, "tiny")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        3,
        12,
        15,
    )
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    logprobs = answer.choices[1].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2] * 6
    assert answer.model_extra is not None and answer.choices[0].model_extra is not None
    assert answer.model_extra["prompt_token_ids"] == [1, 2, 3]
    assert answer.choices[0].model_extra["token_ids"] == [0, 1, 2, 3, 4, 99]
    assert service.requests[0].sampling.logprobs == 2


async def test_the_chat_stream_helper_rebuilds_the_answer(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(
        model="tiny", messages=USER, n=2, stream_options={"include_usage": True}
    ) as stream:
        deltas = [event.delta async for event in stream if event.type == "content.delta" and event.delta]
        answer = await stream.get_final_completion()
    assert sorted(deltas) == sorted(WORDS * 2)
    assert [choice.message.content for choice in answer.choices] == [TEXT, TEXT]
    assert {choice.message.role for choice in answer.choices} == {"assistant"}
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


async def test_the_chat_stream_helper_gathers_logprobs(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="tiny", messages=USER, logprobs=True) as stream:
        answer = await stream.get_final_completion()
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert "".join(entry.token for entry in content) == TEXT
    assert bytes(b for entry in content for b in entry.bytes or []) == TEXT.encode()


async def test_text_completions_streamed_and_not(
    client: openai.AsyncOpenAI, service: ScriptedService
) -> None:
    answer = await client.completions.create(model="tiny", prompt=["a", "b"], n=2, logprobs=1)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(i, TEXT) for i in range(4)]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 24)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == list(WORDS)
    assert answer.choices[0].logprobs.text_offset == [0, 5, 6, 8, 18]
    texts = dict.fromkeys(range(2), "")
    async for chunk in await client.completions.create(model="tiny", prompt=[[1], [2, 3]], stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: TEXT, 1: TEXT}
    assert [r.prompt_token_ids for r in service.requests[2:]] == [(1,), (2, 3)]


async def test_a_picture_arrives_as_it_was_sent(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    data = picture()
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
    await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": content}])
    (message,) = service.requests[0].messages or ()
    assert [getattr(part, "data", None) or getattr(part, "text", None) for part in message.parts] == [
        data,
        "what?",
    ]


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in await client.models.list()] == ["tiny", "group/blind"]
    card = await client.models.retrieve("group/blind")
    assert (card.id, card.created, card.owned_by) == ("group/blind", 1700000001, "triptych")
    for name in ("nothing", "../tiny", "tiny/", "a" * 3000):
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve(name)
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="nothing", messages=USER)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_errors_before_the_first_token_have_a_status(
    client: openai.AsyncOpenAI, service: ScriptedService
) -> None:
    for stream in (False, True):
        service.fail_at = (0, ContextLengthExceeded("too long", param="messages"))
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="tiny", messages=USER, stream=stream)
        assert (bad.value.code, bad.value.param) == ("context_length_exceeded", "messages")
        service.fail_at = (1, WorkerLost("a worker was lost"))
        with pytest.raises(openai.InternalServerError) as lost:
            await client.chat.completions.create(model="tiny", messages=USER, stream=stream)
        assert (lost.value.status_code, lost.value.code) == (503, "worker_lost")
        assert lost.value.response.headers["retry-after"] == "1"
        service.fail_at = (0, Overloaded("busy"))
        with pytest.raises(openai.InternalServerError) as busy:
            await client.chat.completions.create(model="tiny", messages=USER, stream=stream)
        assert busy.value.status_code == 503
        service.fail_at = (0, RuntimeError("secret /path"))
        with pytest.raises(openai.InternalServerError) as ours:
            await client.chat.completions.create(model="tiny", messages=USER, stream=stream)
        assert ours.value.status_code == 500
        assert "secret" not in str(ours.value)


@pytest.mark.parametrize("error", [WorkerLost("a worker was lost"), RuntimeError("secret /path")])
async def test_an_error_in_mid_stream_is_raised_by_the_client(
    client: openai.AsyncOpenAI, service: ScriptedService, error: Exception
) -> None:
    service.fail_at = (3, error)
    words = []
    with pytest.raises(openai.APIError) as caught:
        async for chunk in await client.chat.completions.create(model="tiny", messages=USER, stream=True):
            words.append(chunk.choices[0].delta.content)
    assert words == ["", *WORDS[:2]]
    assert "secret" not in str(caught.value)


async def test_an_error_of_one_prompt_ends_all(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    service.fail_at = (2, WorkerLost("a worker was lost"))
    with pytest.raises(openai.InternalServerError):
        await client.completions.create(model="tiny", prompt=["a", "b", "c"])
    assert [await service.aborted.get() for _ in range(3)]
