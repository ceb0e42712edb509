"""Sends cases over HTTP and writes down what came back. Judges nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from shared.clock import Clock
from tests.chaos.http_client import HttpCall, ResponseBroken, begin_call, request_bytes
from tests.chaos.records import Case, Piece, Seen

#: Longer than any answer may take; reached only when something hangs.
GIVE_UP_S = 45.0


class Client:
    """Clients of one gateway."""

    def __init__(self, address: tuple[str, int], clock: Clock) -> None:
        self._address = address
        self._clock = clock

    async def send(self, case: Case) -> Seen:
        """One request from its first byte to its ending, whatever that is."""
        seen = Seen(case.number, self._clock.now())
        reader = _Reader(case, seen, self._clock)
        request = request_bytes("POST", case.path, msgspec.json.encode(case.body))
        try:
            call = await begin_call(self._address, request, reader.take)
        except OSError:
            seen.end("error", self._clock.now(), "refused")
            return seen
        reader.call = call
        try:
            async with asyncio.timeout(GIVE_UP_S):
                await call.finished
        except TimeoutError:
            seen.end("error", self._clock.now(), "hung")
        except ResponseBroken:
            seen.end("cut", self._clock.now())
        except asyncio.CancelledError:
            if not reader.left:
                raise
        else:
            seen.status = call.status
            reader.whole()
        finally:
            call.drop()
        return seen


class _Reader:
    """Turns body bytes into the record. The client leaves in the middle when the case says so."""

    def __init__(self, case: Case, seen: Seen, clock: Clock) -> None:
        self._case = case
        self._seen = seen
        self._clock = clock
        self._buffer = b""
        self._num_tokens = 0
        self.call: HttpCall | None = None
        self.left = False

    def take(self, data: bytes) -> None:
        self._buffer += data
        if self.call is None or not self._case.stream or self.call.status != 200:
            return
        *events, self._buffer = self._buffer.split(b"\n\n")
        for event in events:
            self._event(event.removeprefix(b"data: "))
        if self._case.abort_after and self._num_tokens >= self._case.abort_after and not self._seen.ending:
            self.left = True
            self._seen.end("left", self._clock.now())
            self.call.drop()

    def whole(self) -> None:
        """The response has ended properly, as HTTP goes."""
        seen, case = self._seen, self._case
        if seen.status != 200:
            seen.end("error", self._clock.now(), _error_code(self._buffer))
        elif case.stream:
            if not seen.ending:
                seen.end("cut", self._clock.now())
        else:
            self._answer(msgspec.json.decode(self._buffer))

    def _event(self, event: bytes) -> None:
        seen = self._seen
        if event == b"[DONE]":
            seen.end("done", self._clock.now())
            return
        body = msgspec.json.decode(event)
        if "error" in body:
            seen.end("error", self._clock.now(), str(body["error"].get("code")))
            return
        if body.get("usage"):
            seen.usage = body["usage"]
        for choice in body["choices"]:
            index = choice["index"]
            ids = choice.get("prompt_token_ids") or body.get("prompt_token_ids")
            if ids is not None:
                seen.prompt = tuple(ids)
            self._tokens(index, choice)
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            if text:
                seen.texts[index] = seen.texts.get(index, "") + text

    def _answer(self, body: Mapping[str, Any]) -> None:
        """A whole answer, not streamed."""
        seen = self._seen
        seen.usage = body["usage"]
        for choice in body["choices"]:
            index = choice["index"]
            ids = choice.get("prompt_token_ids") or body.get("prompt_token_ids")
            seen.prompt = None if ids is None else tuple(ids)
            self._tokens(index, choice)
            seen.texts[index] = choice["text"] if "text" in choice else choice["message"]["content"]
        seen.end("done", self._clock.now())

    def _tokens(self, index: int, choice: Mapping[str, Any]) -> None:
        seen = self._seen
        if ids := choice.get("token_ids"):
            seen.pieces.append(Piece(self._clock.now(), index, tuple(ids)))
            self._num_tokens += len(ids)
        if listing := choice.get("logprobs"):
            seen.logprobs.setdefault(index, []).extend(_logprobs(listing))
        if reason := choice.get("finish_reason"):
            seen.finishes.setdefault(index, []).append(reason)


def _logprobs(listing: Mapping[str, Any]) -> Iterator[tuple[float, tuple[float, ...]]]:
    """Each token's, with its alternatives where they are a list."""
    if "content" in listing:
        for entry in listing["content"]:
            yield entry["logprob"], tuple(top["logprob"] for top in entry["top_logprobs"])
    else:
        for value in listing["token_logprobs"]:
            yield value, ()


def _error_code(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["code"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return "not in the form of an error"


class Load:
    """Sends cases at a pace, and never more than ``max_open`` at a time. ``done`` counts endings."""

    def __init__(
        self, client: Client, case: Callable[[int], Case], *, per_second: float, max_open: int
    ) -> None:
        self._client = client
        self._case = case
        self._pause_s = 1.0 / per_second
        self._slots = asyncio.Semaphore(max_open)
        self._tasks: set[asyncio.Task[None]] = set()
        self.sent = 0
        self.seen: list[Seen] = []

    @property
    def num_open(self) -> int:
        return len(self._tasks)

    async def run(self, at_least: int, over: Callable[[], bool]) -> None:
        """Send until ``at_least`` were sent and ``over``; returns when the last has ended."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while self.sent < at_least or not over():
            await self._slots.acquire()
            task = asyncio.create_task(self._one(self._case(self.sent)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            self.sent += 1
            due = max(due + self._pause_s, loop.time() - 1.0)
            await asyncio.sleep(max(0.0, due - loop.time()))
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _one(self, case: Case) -> None:
        try:
            self.seen.append(await self._client.send(case))
        finally:
            self._slots.release()
