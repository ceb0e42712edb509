"""An encoder's calls of its stores, over real gRPC: stores are found by way of routers, failures are misses,
and a callback always comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from shared.engine.store_calls import RemoteEmbeddingCalls
from shared.errors import InternalError
from shared.rpc.kv_store import KvStoreServicer
from shared.rpc.server import RpcServer
from shared.tiering.embedding_pool import NOT_FOUND, EmbeddingPool, FoundEmbedding
from shared.tiering.membership import Membership
from shared.tiering.nodes import NodeLease
from shared.tiering.remote import EmbeddingClient
from shared.types.identity import IdentityKey
from shared.types.store import EmbeddingHit, EmbeddingKey
from shared.types.transfer import AgentInfo, EcTransferParams
from shared.types.worker import WorkerInfo, WorkerStatus

IDENTITY = IdentityKey("m", "r", "t", "uint64")
AGENT = AgentInfo("w", "a" * 32, 1, (), ())
KEY = EmbeddingKey(b"k" * 32, "o", "p", bytes(32), 1, 8, "float32")
PARAMS = EcTransferParams("lease", AGENT, "ab" * 32, 1, 8, "float32", (0,), (1,), 5)
PATIENCE_S = 10.0


class Store:
    """A KvStorePort of embeddings; ``broken``: every call fails. ``gate`` holds answers back."""

    def __init__(self) -> None:
        self.held: dict[EmbeddingKey, EcTransferParams] = {}
        self.released: list[str] = []
        self.broken = False
        self.gate: asyncio.Event | None = None
        self.asked = asyncio.Event()

    async def _answer(self) -> None:
        self.asked.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.broken:
            raise InternalError("broken")

    async def offer_embedding(self, identity: Any, key: EmbeddingKey, params: EcTransferParams) -> bool:
        await self._answer()
        self.held[key] = params
        return True

    async def lookup_embedding(self, identity: Any, key: EmbeddingKey, rows_per_block: int) -> EmbeddingHit:
        await self._answer()
        params = self.held.get(key)
        return EmbeddingHit() if params is None else EmbeddingHit("lease", 10.0, params)

    def release(self, lease_ids: list[str]) -> None:
        self.released += lease_ids

    def info(self) -> WorkerInfo:
        return WorkerInfo("s", "b" * 32, "kv_store", "127.0.0.1:1", "m", IDENTITY, AGENT)

    def status(self) -> WorkerStatus:
        if self.broken:
            raise InternalError("broken")
        return WorkerStatus("b" * 32)


class Router:
    """Lists stores at these addresses."""

    def __init__(self) -> None:
        self.addresses: list[str] = []

    async def workers(self) -> list[tuple[WorkerInfo, WorkerStatus | None]]:
        return [
            (WorkerInfo(address, "i", "kv_store", address, "m", IDENTITY, AGENT), None)
            for address in self.addresses
        ]

    async def close(self) -> None: ...


class Bench:
    """Two stores, a router that lists none of them so far, and an encoder's calls."""

    def __init__(self) -> None:
        self.stores: dict[str, Store] = {}
        self.router = Router()
        self.pool = EmbeddingPool(
            lambda address: EmbeddingClient(address, IDENTITY, probe_s=0.01), (), replicas=2
        )
        self.membership = Membership(self.pool, (), (self.router,), "m")
        self.calls = RemoteEmbeddingCalls(self.pool, self.membership, asyncio.get_running_loop())

    async def serve(self, stack: AsyncExitStack) -> None:
        for store in (Store(), Store()):
            server = RpcServer()
            KvStoreServicer(store).add_to(server.server)  # type: ignore[arg-type]
            self.stores[f"127.0.0.1:{await server.start()}"] = store
            stack.push_async_callback(server.stop)
        stack.push_async_callback(self.calls.close)

    async def found(self) -> FoundEmbedding:
        found: asyncio.Future[FoundEmbedding] = asyncio.get_running_loop().create_future()
        await asyncio.to_thread(self.calls.lookup, KEY, 4, found.set_result)
        return await asyncio.wait_for(found, PATIENCE_S)

    async def offer(self) -> None:
        done = asyncio.Event()
        await asyncio.to_thread(self.calls.offer, KEY, PARAMS, done.set)
        await asyncio.wait_for(done.wait(), PATIENCE_S)

    async def discover(self) -> None:
        self.router.addresses = list(self.stores)
        await self.membership.refresh()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        made = Bench()
        await made.serve(stack)
        yield made


async def test_stores_that_a_router_lists_are_used(bench: Bench) -> None:
    assert not bench.calls.usable
    await bench.offer()
    assert await bench.found() == NOT_FOUND
    await bench.discover()
    assert bench.calls.usable
    assert await bench.found() == NOT_FOUND
    await bench.offer()
    assert [store.held for store in bench.stores.values()] == [{KEY: PARAMS}] * 2, "both copies"
    found = await bench.found()
    assert found.params == PARAMS and found.lease is not None
    home = bench.stores[found.lease.node]
    await asyncio.to_thread(bench.calls.release, found.lease)
    async with asyncio.timeout(PATIENCE_S):
        while home.released != ["lease"]:
            await asyncio.sleep(0.001)


async def test_a_store_that_fails_is_a_miss_and_asked_again_when_it_is_back(bench: Bench) -> None:
    await bench.discover()
    await bench.offer()
    for store in bench.stores.values():
        store.broken = True
    assert await bench.found() == NOT_FOUND
    await bench.offer()
    assert not bench.calls.usable
    for store in bench.stores.values():
        store.broken = False
    async with asyncio.timeout(PATIENCE_S):
        while not bench.calls.usable:
            await asyncio.sleep(0.001)
    assert (await bench.found()).params == PARAMS


async def test_the_other_copy_is_found_at_once(bench: Bench) -> None:
    await bench.discover()
    await bench.offer()
    first = await bench.found()
    assert first.lease is not None
    bench.stores[first.lease.node].broken = True
    second = await bench.found()
    assert second.params == PARAMS and second.lease is not None and second.lease.node != first.lease.node


async def test_a_lease_of_a_store_that_has_left_is_no_trouble(bench: Bench) -> None:
    await bench.discover()
    bench.calls.release(NodeLease("gone:1", "lease"))
    await bench.offer()
    assert all(not store.released for store in bench.stores.values())


async def test_closing_ends_calls_under_way_and_their_callbacks_come(bench: Bench) -> None:
    await bench.discover()
    for store in bench.stores.values():
        store.gate = asyncio.Event()
    found: list[FoundEmbedding] = []
    offered: list[bool] = []
    bench.calls.lookup(KEY, 4, found.append)
    bench.calls.offer(KEY, PARAMS, lambda: offered.append(True))
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(store.asked.wait() for store in bench.stores.values()))
        await bench.calls.close()
    assert (found, offered) == ([NOT_FOUND], [True])
