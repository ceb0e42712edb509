"""The router's end of a worker's stream (``worker.proto``).

Owns one connection to one worker incarnation. Which worker to use, and what a loss means, is the
router's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import grpc

from shared.errors import InvalidRequest, RequestTooLarge, TriptychError, WorkerLost
from shared.rpc.client import open_channel, typed_errors
from shared.rpc.convert_events import events_from_wire
from shared.rpc.convert_worker import command_to_wire, info_from_wire, status_from_wire
from shared.rpc.server import MAX_MESSAGE_BYTES
from shared.rpc.status import error_of
from shared.rpc.worker_stream import MEDIA_CHUNK_BYTES, pack
from shared.types.worker import Command, Event, WorkerInfo, WorkerStatus
from triptych.v1 import worker_pb2 as pb
from triptych.v1 import worker_pb2_grpc

#: Headroom for the frame around one command.
_MAX_COMMAND_BYTES = MAX_MESSAGE_BYTES - 1024
#: A worker that does not read, or does not end its side, must not hold us up for longer.
CLOSE_S = 0.5


class WorkerClient:
    """Connect once, then send commands and read events until the stream ends. Event loop only."""

    def __init__(self, address: str, router_id: str, epoch: int) -> None:
        """``epoch`` fences earlier streams of ``router_id`` at the worker."""
        self._hello = pb.RouterHello(router_id=router_id, epoch=epoch)
        self._channel = open_channel(address)
        self._stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self._stream: grpc.aio.StreamStreamCall[pb.WorkerStreamRequest, pb.WorkerStreamResponse] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._pending: list[pb.Command] = []
        self._wake = asyncio.Event()
        self._closed = False

    async def connect(self, timeout_s: float = 5.0) -> WorkerInfo:
        """Open the stream; returns who answered. Raises what the worker refused it with, or WorkerLost."""
        try:
            async with asyncio.timeout(timeout_s):
                with typed_errors():
                    self._stream = self._stub.WorkerStream()  # type: ignore[call-arg]  # we write by hand
                    await self._stream.write(pb.WorkerStreamRequest(hello=self._hello))
                    first = await self._stream.read()
        except TimeoutError:
            raise WorkerLost("the worker did not answer in time") from None
        except asyncio.InvalidStateError:
            # The call ended before the hello was written; only its status says why.
            raise await self._failure() from None
        if not isinstance(first, pb.WorkerStreamResponse):
            raise await self._failure()
        info = info_from_wire(first.hello.info)
        self._writer = asyncio.create_task(self._write())
        return info

    def send(self, *commands: Command) -> None:
        """Queue commands, in order; they leave together at the event loop's next turn. After the end
        of the stream they go nowhere. Raises InvalidRequest or RequestTooLarge, and then queues none."""
        wire = [command_to_wire(command) for command in commands]
        if any(command.ByteSize() > _MAX_COMMAND_BYTES for command in wire):
            raise RequestTooLarge("the request is larger than a message may be")
        self._pending.extend(wire)
        self._wake.set()

    async def events(self) -> AsyncIterator[list[Event]]:
        """Batches of events as they come. Raises WorkerLost when the stream ends, however it ends;
        returns after ``close``. One reader at a time."""
        stream = self._stream
        if stream is None:
            raise WorkerLost("the worker is not connected")
        try:
            while True:
                response = await stream.read()
                if not isinstance(response, pb.WorkerStreamResponse):
                    break
                if response.events:
                    yield events_from_wire(response.events)
        except (grpc.aio.AioRpcError, InvalidRequest, asyncio.InvalidStateError) as error:
            if not self._closed:
                raise WorkerLost("the worker's stream broke") from error
        except asyncio.CancelledError:
            # Also raised by gRPC when ``close`` cancels the call; the reader's own task is not cancelled.
            if not self._closed:
                raise
        if not self._closed:
            raise WorkerLost("the worker's stream ended")

    async def put_media(self, mm_hash: str, data: bytes, timeout_s: float = 30.0) -> None:
        """Send a media item to an encoder. Raises TriptychError."""
        with typed_errors():
            await self._stub.PutMedia(_media(mm_hash, data), timeout=timeout_s)

    async def status(self, timeout_s: float = 2.0) -> tuple[WorkerInfo, WorkerStatus]:
        """Ask outside the stream. Raises TriptychError."""
        with typed_errors():
            reply = await self._stub.GetStatus(pb.WorkerServiceGetStatusRequest(), timeout=timeout_s)
        return info_from_wire(reply.info), status_from_wire(reply.status)

    async def close(self) -> None:
        """Send what is queued, end the stream. Calling it twice is safe."""
        if self._closed:
            return
        self._closed = True
        if self._writer is not None:
            self._wake.set()
            await asyncio.wait([self._writer], timeout=CLOSE_S)
            self._writer.cancel()
        if self._stream is not None:
            await self._end(self._stream)
            self._stream.cancel()
        await self._channel.close(None)

    async def _end(self, stream: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        """Close our side and let the worker close its own: a cancelled call may overtake its last message."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await stream.done_writing()
        ended = asyncio.ensure_future(stream.code())
        await asyncio.wait([ended], timeout=CLOSE_S)
        ended.cancel()

    async def _write(self) -> None:
        stream = self._stream
        if stream is None:
            return
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                commands, self._pending = self._pending, []
                for batch in pack(commands):
                    await stream.write(pb.WorkerStreamRequest(commands=batch))
                if self._closed and not self._pending:
                    return
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader reports how the stream ended

    async def _failure(self) -> TriptychError:
        if self._stream is not None:
            self._stream.cancel()
            failure = grpc.aio.AioRpcError(
                await self._stream.code(),
                await self._stream.initial_metadata(),
                await self._stream.trailing_metadata(),
                details=await self._stream.details(),
                debug_error_string=None,
            )
            return error_of(failure)
        return WorkerLost("the worker is not connected")


def _media(mm_hash: str, data: bytes) -> Iterator[pb.PutMediaRequest]:
    yield pb.PutMediaRequest(header=pb.MediaHeader(mm_hash=mm_hash, nbytes=len(data)))
    for start in range(0, len(data), MEDIA_CHUNK_BYTES):
        yield pb.PutMediaRequest(chunk=data[start : start + MEDIA_CHUNK_BYTES])
