"""A kv_store that one router knows is found by way of Redis by all routers, and by their workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from msgspec import structs

from services.router.control import RouterControl
from shared.clock import ManualClock
from shared.config.services import RoutingConfig
from shared.registry.memory import MemoryRegistry
from shared.routing.stores import KnownStores
from shared.routing.workers import Worker, WorkerLink, WorkerPool
from shared.rpc.control import ControlClient, ControlServicer
from shared.rpc.server import RpcServer
from shared.tiering.membership import ROUNDS_WITHOUT, Membership
from shared.tiering.nodes import NodePool
from shared.types.worker import Event, WorkerInfo
from tests.contract.registry.harness import RedisHarness, RedisServer
from tests.unit.rpc.samples import info

STORE = structs.replace(info("store"), kind="kv_store", address="127.0.0.1:9")


class Nobody:
    """Listens to workers, of which there are none."""

    def deliver(self, worker: Worker, events: list[Event]) -> None:
        raise AssertionError

    def worker_ready(self, worker: Worker) -> None:
        raise AssertionError

    def worker_lost(self, worker: Worker) -> None:
        raise AssertionError


class Node:
    """A node that is never asked."""

    paused = False

    async def close(self) -> None: ...


def dial(info: WorkerInfo, number: int) -> WorkerLink:
    raise AssertionError("a store is not dialled")


class Side:
    """A router over the shared registry, and a worker that asks it for stores."""

    def __init__(self, harness: RedisHarness) -> None:
        self.clock = ManualClock(1.0)
        self.local = MemoryRegistry(self.clock, 5.0)
        self.remote = harness.open()
        self.workers = WorkerPool(dial, self.clock, Nobody(), RoutingConfig())
        stores = KnownStores(self.clock, 5.0)
        self.control = RouterControl(self.workers, stores, self.local, self.remote, 1.0)
        self.server = RpcServer()
        self.nodes: NodePool[Node] = NodePool(lambda address: Node(), ())

    async def start(self) -> None:
        ControlServicer(self.control).add_to(self.server.server)
        client = ControlClient(f"127.0.0.1:{await self.server.start()}")
        self.membership = Membership(self.nodes, (), (client,), STORE.model)

    async def close(self) -> None:
        await self.membership.close()
        await self.server.stop()
        await self.workers.close()
        await self.remote.close()

    async def announce(self, store: WorkerInfo) -> WorkerInfo:
        """As the store does: again with the epoch that it was given."""
        epoch, _ = await self.control.announce(store)
        store = structs.replace(store, agent=structs.replace(store.agent, epoch=epoch))
        await self.control.announce(store)
        return store

    async def known(self) -> tuple[list[str], frozenset[str]]:
        """What the router lists, and what the worker uses, a heartbeat later."""
        await self.control.poll()
        await self.membership.refresh()
        return [store.address for store, _ in self.control.workers()], self.nodes.addresses


@pytest.fixture
async def sides(clean_redis: RedisServer) -> AsyncIterator[tuple[Side, Side]]:
    harness = RedisHarness(clean_redis.url)
    async with AsyncExitStack() as stack:
        both = Side(harness), Side(harness)
        for side in both:
            await side.start()
            stack.push_async_callback(side.close)
        yield both


async def test_a_store_is_found_and_forgotten_by_all(sides: tuple[Side, Side]) -> None:
    here, there = sides
    assert await there.known() == ([], frozenset())
    store = await here.announce(STORE)
    for side in sides:
        assert await side.known() == ([STORE.address], {STORE.address})
    await here.control.withdraw(store.worker_id, store.incarnation)
    for side in sides:
        for _ in range(ROUNDS_WITHOUT):
            known = await side.known()
        assert known == ([], frozenset())


async def test_a_store_whose_membership_lapses_is_forgotten(
    sides: tuple[Side, Side], clean_redis: RedisServer
) -> None:
    here, there = sides
    await here.announce(STORE)
    assert await there.known() == ([STORE.address], {STORE.address})
    await RedisHarness(clean_redis.url).expire()
    here.clock.advance(5.0)
    for side in sides:
        for _ in range(ROUNDS_WITHOUT):
            known = await side.known()
        assert known == ([], frozenset())


async def test_without_redis_everybody_goes_on_with_what_he_knows(
    sides: tuple[Side, Side], clean_redis: RedisServer
) -> None:
    here, there = sides
    await here.announce(STORE)
    assert await there.known() == ([STORE.address], {STORE.address})
    for side in sides:
        side.remote._timeout_s = 0.05
    clean_redis.freeze()
    try:
        for side in sides:
            for _ in range(2 * ROUNDS_WITHOUT):
                assert await side.known() == ([STORE.address], {STORE.address})
        other = structs.replace(STORE, worker_id="other", address="127.0.0.1:10")
        await there.announce(other)
        assert await there.known() == (
            [other.address, STORE.address],
            {STORE.address, other.address},
        )
    finally:
        clean_redis.thaw()
