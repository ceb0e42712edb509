"""Announcing, withdrawing and listing workers over a real connection."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from shared.clock import ManualClock
from shared.errors import InvalidRequest, Overloaded
from shared.registry.memory import MemoryRegistry
from shared.rpc.client import open_channel, typed_errors
from shared.rpc.control import Announcer, ControlClient, ControlServicer
from shared.types.worker import WorkerInfo, WorkerStatus
from tests.unit.rpc.samples import info, serving
from triptych.v1 import control_pb2 as pb
from triptych.v1 import control_pb2_grpc


class Router:
    """A ControlPort over a memory registry; it knows no status but of worker ``w1``."""

    def __init__(self) -> None:
        self.registry = MemoryRegistry(ManualClock(), 60)
        self.listed: list[WorkerInfo] = []
        self.announcements = 0
        self.changed = asyncio.Event()

    async def announce(self, info: WorkerInfo) -> tuple[int, float]:
        epoch = await self.registry.announce(info)
        await self._update()
        self.announcements += 1
        return epoch, 0.02

    async def withdraw(self, worker_id: str, incarnation: str) -> None:
        await self.registry.withdraw(worker_id, incarnation)
        await self._update()

    def workers(self) -> Sequence[tuple[WorkerInfo, WorkerStatus | None]]:
        return [(w, WorkerStatus("i0", steps=7) if w.worker_id == "w1" else None) for w in self.listed]

    async def _update(self) -> None:
        self.listed = await self.registry.workers()
        self.changed.set()

    async def until_announced(self, times: int) -> None:
        async with asyncio.timeout(10):
            while self.announcements < times:
                self.changed.clear()
                await self.changed.wait()


async def test_announce_list_withdraw() -> None:
    router = Router()
    async with serving(ControlServicer(router)) as address:
        client = ControlClient(address)
        assert await client.announce(info("w0")) == (1, 0.02)
        assert await client.announce(info("w0", "i1")) == (2, 0.02)
        assert await client.announce(info("w1")) == (1, 0.02)
        assert await client.workers() == [(info("w0", "i1"), None), (info("w1"), WorkerStatus("i0", steps=7))]
        await client.withdraw("w0", "i0")
        await client.withdraw("w1", "i0")
        assert await client.workers() == [(info("w0", "i1"), None)]
        await client.close()


async def test_announcer_repeats_itself_and_reports_its_epoch_once() -> None:
    router = Router()
    epochs: list[int] = []
    async with serving(ControlServicer(router)) as address:
        announcer = Announcer([address], lambda: info("w0"), epochs.append)
        announcer.start()
        await router.until_announced(3)
        assert router.listed == [info("w0")]
        await announcer.close()
        await announcer.close()
    assert router.listed == []
    assert epochs == [1]


async def test_announcer_reports_the_highest_epoch_of_all_routers() -> None:
    routers = [Router(), Router()]
    for life in ("x", "y"):
        await routers[1].announce(info("w0", life))
    epochs: list[int] = []
    async with serving(ControlServicer(routers[0])) as first, serving(ControlServicer(routers[1])) as second:
        announcer = Announcer([first, second], lambda: info("w0"), epochs.append)
        announcer.start()
        await routers[0].until_announced(2)
        await routers[1].until_announced(4)
        await announcer.close()
    assert epochs[-1] == 3
    assert epochs == sorted(set(epochs))


async def test_announcer_finds_a_router_that_comes_late_and_comes_back(free_port: int) -> None:
    epochs: list[int] = []
    announcer = Announcer(
        [f"127.0.0.1:{free_port}"], lambda: info("w0", epoch=max(epochs, default=0)), epochs.append
    )
    announcer.start()
    for _ in range(2):
        router = Router()
        async with serving(ControlServicer(router), port=free_port):
            await router.until_announced(2)
    # The second router knew nothing, but does not hand out an epoch that was in use before.
    assert epochs == [1]
    await announcer.close()


@pytest.mark.parametrize(
    "request_", [pb.AnnounceRequest(), pb.AnnounceRequest(info={"worker_id": "w", "incarnation": "i"})]
)
async def test_malformed_announcements_are_refused(request_: pb.AnnounceRequest) -> None:
    async with serving(ControlServicer(Router())) as address, open_channel(address) as channel:
        with pytest.raises(InvalidRequest), typed_errors():
            await control_pb2_grpc.ControlServiceStub(channel).Announce(request_)


async def test_a_refusal_of_the_router_keeps_its_type() -> None:
    class Full(Router):
        async def announce(self, info: WorkerInfo) -> tuple[int, float]:
            raise Overloaded("too many workers")

    async with serving(ControlServicer(Full())) as address:
        client = ControlClient(address)
        with pytest.raises(Overloaded):
            await client.announce(info())
        await client.close()
