"""Streams an answer as server-sent events: owns when bytes go out and when the stream is given up."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from services.router.gateway.calls import TokenNames, disconnected, generate_all, run_unless
from shared.api.openai import ApiCall
from shared.api.sse import ChunkWriter, error_event
from shared.errors import InternalError, TriptychError
from shared.types.inference import Delta, InferenceService

_log = logging.getLogger(__name__)
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class StreamResponse(Response):
    """Writes each batch of outputs as one body message, straight to ASGI.

    The head is held until the first token, so that a request that fails before it gets a status of its
    own. A client that disconnects, or reads nothing for ``stall_s``, aborts the request.
    """

    def __init__(
        self,
        service: InferenceService,
        call: ApiCall,
        writer: ChunkWriter,
        names: TokenNames,
        stall_s: float,
    ) -> None:
        super().__init__()
        self._service, self._call, self._writer, self._names = service, call, writer, names
        self._stall_s = stall_s
        self._started = False
        self._writing = False
        self._num_writes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises TriptychError only before the first byte."""
        await run_unless(self._given_up(receive), self._pump(send))

    async def _pump(self, send: Send) -> None:
        try:
            await self._write_all(send)
        except Exception as error:
            if not self._started:
                raise
            if not isinstance(error, TriptychError):
                _log.exception("unforeseen error in a stream")
                error = InternalError("internal error")
            await self._write(send, error_event(error), more=False)

    async def _write_all(self, send: Send) -> None:
        write, wants_names, held = self._writer.write, self._call.options.logprobs, b""
        async with aclosing(generate_all(self._service, self._call.requests)) as batches:
            async for prompt, outputs in batches:
                if wants_names:
                    await self._names.load(outputs)
                data = write(prompt, outputs)
                if not self._started:
                    held += data
                    if not any(isinstance(output, Delta) for output in outputs):
                        continue
                    data = held
                    await self._start(send)
                if data:
                    await self._write(send, data)
        if not self._started:
            await self._start(send)
        await self._write(send, self._writer.finish(), more=False)

    async def _start(self, send: Send) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})

    async def _write(self, send: Send, data: bytes, *, more: bool = True) -> None:
        self._writing = True
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self._writing = False
        self._num_writes += 1

    async def _given_up(self, receive: Receive) -> None:
        """Returns when the client is gone, or a whole ``stall_s`` passed within one write."""
        while True:
            before = self._num_writes
            try:
                async with asyncio.timeout(self._stall_s):
                    return await disconnected(receive)
            except TimeoutError:
                if self._writing and self._num_writes == before:
                    return
