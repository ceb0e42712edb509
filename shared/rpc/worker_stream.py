"""The one stream between a router and a worker, both ends (``worker.proto``).

Owns queueing, coalescing and the end of streams. What commands mean is behind WorkerPort; liveness
and retries are the router's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from shared.errors import InvalidRequest, Overloaded, PermissionDenied, RequestTooLarge
from shared.rpc import checks
from shared.rpc.convert_events import events_to_wire
from shared.rpc.convert_worker import command_from_wire, command_request_id, info_to_wire, status_to_wire
from shared.telemetry.logs import get_logger
from shared.types.worker import Command, Event, Failed, Status, WorkerInfo, WorkerStatus
from triptych.v1 import worker_pb2 as pb
from triptych.v1 import worker_pb2_grpc

#: Messages are filled up to about this size; a larger single entry still travels alone.
SOFT_MESSAGE_BYTES = 1 << 20
MEDIA_CHUNK_BYTES = 64 << 10
#: A router that reads so slowly that this many events wait for it is cut off.
MAX_PENDING_EVENTS = 1 << 18

M = TypeVar("M", bound=Message)
log = get_logger(__name__)


class WorkerPort(Protocol):
    """What a worker offers to the wire. Called on the event loop; nothing may block."""

    def info(self) -> WorkerInfo: ...

    def submit(self, router_id: str, commands: list[Command]) -> None:
        """Take a router's commands, in order. Does not raise: what goes wrong becomes a Failed event."""
        ...

    def subscribe(self, router_id: str, deliver: Callable[[list[Event]], None]) -> Callable[[], None]:
        """Hand every batch of that router's events to ``deliver`` from now on, from any one thread; the
        list is not changed afterwards. Returns the function that ends it."""
        ...

    async def put_media(self, mm_hash: str, data: bytes) -> None:
        """Keep a media item's bytes for a coming Encode. Raises TriptychError."""
        ...

    def status(self) -> WorkerStatus: ...

    def detached(self, router_id: str) -> None:
        """This router's stream ended and none has replaced it."""
        ...


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """A WorkerPort on the wire. Of one router id the newest stream with the highest epoch counts.

    Every ``heartbeat_s`` each stream says the port's Status, from the event loop: a worker in the middle
    of a long step is alive. None: only what the port emits is said.
    """

    def __init__(
        self, port: WorkerPort, *, max_media_bytes: int = 16 << 20, heartbeat_s: float | None = None
    ) -> None:
        self._port = port
        self._max_media_bytes = max_media_bytes
        self._heartbeat_s = heartbeat_s
        self._outboxes: dict[str, _Outbox] = {}

    def add_to(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)

    async def WorkerStream(
        self, request_iterator: AsyncIterator[pb.WorkerStreamRequest], context: object
    ) -> AsyncIterator[pb.WorkerStreamResponse]:
        outbox = self._attach(await _hello(request_iterator))
        unsubscribe = self._port.subscribe(outbox.router_id, outbox.put)
        tasks = [asyncio.create_task(self._read(request_iterator, outbox))]
        if self._heartbeat_s is not None:
            tasks.append(asyncio.create_task(self._beat(outbox, self._heartbeat_s)))
        try:
            yield pb.WorkerStreamResponse(hello=pb.WorkerHello(info=info_to_wire(self._port.info())))
            async for events in outbox.batches():
                for batch in pack(events_to_wire(events)):
                    yield pb.WorkerStreamResponse(events=batch)
        finally:
            unsubscribe()
            for task in tasks:
                task.cancel()
            if self._outboxes.get(outbox.router_id) is outbox:
                del self._outboxes[outbox.router_id]
                self._port.detached(outbox.router_id)

    async def PutMedia(
        self, request_iterator: AsyncIterator[pb.PutMediaRequest], context: object
    ) -> pb.PutMediaResponse:
        first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("part") != "header":
            raise checks.refuse("header", "must come first")
        mm_hash = checks.text("mm_hash", first.header.mm_hash, checks.MAX_ID_CHARS, required=True)
        nbytes = first.header.nbytes
        if nbytes > self._max_media_bytes:
            raise RequestTooLarge("the media item is larger than the limit", param="nbytes")
        data = bytearray()
        async for request in request_iterator:
            if request.WhichOneof("part") != "chunk" or len(request.chunk) > MEDIA_CHUNK_BYTES:
                raise checks.refuse("chunk", "is missing or too long")
            data += request.chunk
            if len(data) > nbytes:
                break
        if len(data) != nbytes:
            raise checks.refuse("nbytes", "is not the number of bytes sent")
        await self._port.put_media(mm_hash, bytes(data))
        return pb.PutMediaResponse()

    async def GetStatus(
        self, request: pb.WorkerServiceGetStatusRequest, context: object
    ) -> pb.WorkerServiceGetStatusResponse:
        return pb.WorkerServiceGetStatusResponse(
            info=info_to_wire(self._port.info()), status=status_to_wire(self._port.status())
        )

    def _attach(self, hello: pb.RouterHello) -> _Outbox:
        router_id = checks.text("router_id", hello.router_id, checks.MAX_ID_CHARS, required=True)
        earlier = self._outboxes.get(router_id)
        if earlier is not None:
            if hello.epoch < earlier.epoch:
                raise PermissionDenied("a later router of this id is attached", code="stale_epoch")
            earlier.close()
        outbox = self._outboxes[router_id] = _Outbox(router_id, hello.epoch)
        return outbox

    async def _beat(self, outbox: _Outbox, interval_s: float) -> None:
        while not outbox.closed:
            await asyncio.sleep(interval_s)
            outbox.put([Status(self._port.status())])

    async def _read(self, requests: AsyncIterator[pb.WorkerStreamRequest], outbox: _Outbox) -> None:
        """Hand commands over until the router ends its side; then, or on an error, end the stream."""
        failure: Exception | None = None
        try:
            async for request in requests:
                if outbox.closed:
                    return  # fenced: what a replaced stream still sends counts for nothing
                commands = [c for wire in request.commands if (c := _command(wire, outbox)) is not None]
                if commands:
                    self._port.submit(outbox.router_id, commands)
        except Exception as error:
            # Raised again where the answers are made, so that one place maps errors to statuses.
            failure = error
        outbox.close(failure)


async def _hello(requests: AsyncIterator[pb.WorkerStreamRequest]) -> pb.RouterHello:
    first = await anext(requests, None)
    if first is None or not first.HasField("hello") or first.commands:
        raise checks.refuse("hello", "must come first and alone")
    return first.hello


def _command(wire: pb.Command, outbox: _Outbox) -> Command | None:
    """A malformed command of a request fails that request alone, not the stream of all others."""
    try:
        return command_from_wire(wire)
    except InvalidRequest as error:
        request_id = command_request_id(wire)
        if not request_id:
            raise
        outbox.put([Failed(request_id, error.code, error.message, retryable=False, param=error.param or "")])
        return None


class _Outbox:
    """Events on their way to one router: filled from any thread, emptied on the event loop."""

    def __init__(self, router_id: str, epoch: int) -> None:
        self.router_id = router_id
        self.epoch = epoch
        self.closed = False
        self._failure: Exception | None = None
        self._loop = asyncio.get_running_loop()
        # One object for life: its operations are atomic, so the two threads need no lock.
        self._pending: deque[Event] = deque()
        self._ready = asyncio.Event()
        self._waking = False

    def put(self, events: Sequence[Event]) -> None:
        """Queue events; any thread. Dropped once closed."""
        if self.closed or not events:
            return
        self._pending.extend(events)
        if len(self._pending) > MAX_PENDING_EVENTS:
            log.error("a router reads too slowly and is cut off", router=self.router_id)
            self._failure = Overloaded("events are read too slowly")
            self.closed = True
        if not self._waking:
            self._waking = True
            try:
                self._loop.call_soon_threadsafe(self._ready.set)
            except RuntimeError:  # the loop is closed: nobody reads any more
                self.closed = True

    def close(self, failure: Exception | None = None) -> None:
        """End the stream; on the event loop. ``failure`` is raised to the router."""
        if not self.closed:
            self.closed = True
            self._failure = failure
            self._ready.set()

    async def batches(self) -> AsyncIterator[list[Event]]:
        """Whatever is queued, each time something is, until closed."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            # Before the events are taken: one that is added later wakes us again.
            self._waking = False
            if self.closed:
                if self._failure is not None:
                    raise self._failure
                return
            events = [self._pending.popleft() for _ in range(len(self._pending))]
            if events:
                yield events


def pack(entries: Iterable[M]) -> Iterable[list[M]]:
    """The entries in runs of at most about ``SOFT_MESSAGE_BYTES``."""
    batch: list[M] = []
    size = 0
    for entry in entries:
        nbytes = entry.ByteSize()
        if batch and size + nbytes > SOFT_MESSAGE_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(entry)
        size += nbytes
    if batch:
        yield batch
