"""A worker, a store and a service of the smallest kind, for tests over real connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from shared.rpc.server import RpcServer
from shared.types.identity import IdentityKey
from shared.types.request import GenerationRequest, SamplingParams
from shared.types.transfer import AgentInfo
from shared.types.worker import Command, Event, WorkerInfo, WorkerStatus

IDENTITY = IdentityKey("m", "r", "t", "float32")
INFO = WorkerInfo("w0", "i0", "decode", "127.0.0.1:1", "m", IDENTITY, AgentInfo("w0", "i0", 0, (), ()))


def info(worker_id: str = "w0", incarnation: str = "i0", epoch: int = 0) -> WorkerInfo:
    agent = AgentInfo(worker_id, incarnation, epoch, (), ())
    return msgspec.structs.replace(INFO, worker_id=worker_id, incarnation=incarnation, agent=agent)


def request(request_id: str = "r", num_tokens: int = 3) -> GenerationRequest:
    return GenerationRequest(
        request_id, "m", tuple(range(num_tokens)), num_tokens, SamplingParams(max_tokens=4)
    )


class EchoWorker:
    """A WorkerPort that records what it is given; ``emit`` is its engine's voice."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.media: dict[str, bytes] = {}
        self.subscribers: list[Callable[[list[Event]], None]] = []
        self.left: list[str] = []
        self.changed = asyncio.Event()
        self.refuse_media: Exception | None = None

    def emit(self, *events: Event) -> None:
        for deliver in list(self.subscribers):
            deliver(list(events))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; it is looked at after each call from the wire."""
        async with asyncio.timeout(10):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def info(self) -> WorkerInfo:
        return INFO

    def status(self) -> WorkerStatus:
        return WorkerStatus("i0", steps=len(self.commands))

    def submit(self, router_id: str, commands: list[Command]) -> None:
        self.commands.extend(commands)
        self.changed.set()

    def subscribe(self, router_id: str, deliver: Callable[[list[Event]], None]) -> Callable[[], None]:
        self.subscribers.append(deliver)
        self.changed.set()
        return lambda: self.subscribers.remove(deliver)

    async def put_media(self, mm_hash: str, data: bytes) -> None:
        if self.refuse_media is not None:
            raise self.refuse_media
        self.media[mm_hash] = data

    def detached(self, router_id: str) -> None:
        self.left.append(router_id)
        self.changed.set()


@asynccontextmanager
async def serving(*servicers: Any, port: int = 0, max_message_bytes: int = 4 << 20) -> AsyncIterator[str]:
    """A real server on a free port; yields its address."""
    server = RpcServer(port=port, max_message_bytes=max_message_bytes)
    for servicer in servicers:
        servicer.add_to(server.server)
    bound = await server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        await server.stop()


async def collect(batches: AsyncIterator[Sequence[Any]], count: int) -> list[Any]:
    """The first ``count`` entries of the batches."""
    found: list[Any] = []
    async with asyncio.timeout(10):
        while len(found) < count:
            found.extend(await anext(batches))
    return found
