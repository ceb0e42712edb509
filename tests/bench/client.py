"""Streams completions and notes when each token arrived. Owns the client's side of a measurement."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tests.bench.prompts import Prompt
from tests.chaos.http_client import begin_call, request_bytes


@dataclass
class Stream:
    """One answer: token ids, and for each the second at which it arrived, counted from ``began``."""

    began: float
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    problem: str = ""

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0]

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


class Client:
    """Asks one gateway. Greedy, ``num_tokens`` a prompt whatever the model would stop at."""

    def __init__(self, url: str, model: str, num_tokens: int) -> None:
        parts = urlsplit(url)
        self._address = (str(parts.hostname), int(parts.port or 80))
        self._fixed: dict[str, Any] = {
            "model": model,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        self._num_tokens = num_tokens

    def all_at_once(self, prompts: Sequence[Prompt]) -> tuple[list[Stream], float]:
        """One stream a prompt, all started together; the answers, and the seconds until the last ended.
        Raises RuntimeError when an answer is not whole."""
        return asyncio.run(self._all(prompts))

    async def _all(self, prompts: Sequence[Prompt]) -> tuple[list[Stream], float]:
        began = time.perf_counter()
        streams = await asyncio.gather(*(self._one(prompt) for prompt in prompts))
        seconds = time.perf_counter() - began
        for prompt, stream in zip(prompts, streams, strict=True):
            if stream.problem or len(stream.token_ids) != self._num_tokens:
                raise RuntimeError(f"{len(stream.token_ids)} tokens came back; {stream.problem}")
            if stream.num_prompt_tokens != len(prompt.token_ids):
                raise RuntimeError(f"the prompt was taken as {stream.num_prompt_tokens} tokens")
        return streams, seconds

    async def _one(self, prompt: Prompt) -> Stream:
        body = json.dumps({**self._fixed, "prompt": prompt.text}).encode()
        stream, rest = Stream(time.perf_counter()), b""

        def on_body(data: bytes) -> None:
            nonlocal rest
            now = time.perf_counter() - stream.began
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    _take(stream, json.loads(line[6:]), now)

        call = await begin_call(self._address, request_bytes("POST", "/v1/completions", body), on_body)
        await call.finished
        if call.status != 200:
            stream.problem = f"status {call.status}: {rest[:300]!r}"
        return stream


def _take(stream: Stream, event: dict[str, Any], now: float) -> None:
    if "error" in event:
        stream.problem = str(event["error"])
    for choice in event.get("choices", ()):
        ids = choice.get("token_ids") or ()
        stream.token_ids += ids
        stream.arrivals += [now] * len(ids)
    if event.get("usage"):
        stream.num_prompt_tokens = event["usage"]["prompt_tokens"]


def median(values: Sequence[float]) -> float:
    """The middle value; NaN of none."""
    return statistics.median(values) if values else float("nan")
