"""Asks the gateway for greedy completions of token ids with log-probabilities, and reads the answers back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from shared.text.tokenizer import Tokenizer
from tests.e2e.reference import TOP, Answer


class Asked(NamedTuple):
    """One completion to ask for. ``trace_id``: 32 hex digits, under which its spans arrive."""

    prompt: tuple[int, ...]
    num_tokens: int
    cache_salt: str
    trace_id: str


class Completions:
    """One client of one deployment. ``on_tokens`` gets the number of tokens so far."""

    def __init__(self, http: httpx.AsyncClient, model: str, model_dir: Path) -> None:
        self._http = http
        self._model = model
        tokenizer = Tokenizer.load(model_dir)
        self._ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}

    async def ask(self, asked: Asked) -> Answer:
        """The whole answer at once."""
        response = await self._http.post("/v1/completions", json=self._body(asked), headers=_headers(asked))
        assert response.status_code == 200, response.text
        body = response.json()
        cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        return self._answer(body["choices"], cached)

    async def stream(self, asked: Asked, on_tokens: Callable[[int], None]) -> Answer:
        """The answer as it comes."""
        choices: list[Mapping[str, Any]] = []
        count = 0
        body = {**self._body(asked), "stream": True}
        async with self._http.stream(
            "POST", "/v1/completions", json=body, headers=_headers(asked)
        ) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    return self._answer(choices, 0)
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                choices += event["choices"]
                count += sum(len(choice.get("token_ids") or ()) for choice in event["choices"])
                on_tokens(count)
        raise AssertionError("the stream ended without [DONE]")

    def _body(self, asked: Asked) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": list(asked.prompt),
            "max_tokens": asked.num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": TOP,
            "return_token_ids": True,
            "cache_salt": asked.cache_salt,
        }

    def _answer(self, parts: Sequence[Mapping[str, Any]], cached: int) -> Answer:
        """One answer of its parts in order, streamed or not."""
        token_ids: list[int] = []
        logprobs: list[float] = []
        tops: list[Mapping[int, float]] = []
        for part in parts:
            token_ids += part.get("token_ids") or ()
            if listing := part["logprobs"]:
                logprobs += listing["token_logprobs"]
                tops += [
                    {self._id(spelled): value for spelled, value in top.items()}
                    for top in listing["top_logprobs"]
                ]
        return Answer(tuple(token_ids), tuple(logprobs), tuple(tops), cached)

    def _id(self, spelled: str) -> int:
        """The id of a token as a listing spells it."""
        if spelled.startswith("bytes:"):
            return self._ids[bytes(int(digits, 16) for digits in spelled.split("\\x")[1:])]
        return self._ids[spelled.encode()]


def _headers(asked: Asked) -> dict[str, str]:
    return {"traceparent": f"00-{asked.trace_id}-{'1' * 16}-01"}
