"""A worker's client of one node of the store, over a real gRPC server: every trouble is a miss."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from prometheus_client import Counter

from shared.errors import InternalError
from shared.kv_cache.block_hash import HashedBlock
from shared.kv_cache.manager import CommittedBlock
from shared.rpc.kv_store import KvStoreServicer
from shared.rpc.server import RpcServer
from shared.telemetry import metrics
from shared.tiering.remote import MISS, KvStoreClient
from shared.types.identity import IdentityKey, LayoutSpec
from shared.types.kv import KVGroupSpec
from shared.types.store import BlockKey, OfferedBlock, StoreHit
from shared.types.transfer import AgentInfo, BlockRef, KvTransferParams
from shared.types.worker import WorkerInfo, WorkerStatus

GROUP = KVGroupSpec(1, 2, 1, "uint64")
LAYOUT = LayoutSpec((GROUP, GROUP), 2)
IDENTITY = IdentityKey("m", "r", "t", "uint64")
AGENT = AgentInfo("w", "a" * 32, 1, (), ())
WANTED = [HashedBlock(bytes([n]) * 32, bytes([n - 1]) * 32, (n, n), (("p", -1),)) for n in range(1, 4)]


class Script:
    """A store that answers as told and remembers what it was asked."""

    def __init__(self) -> None:
        self.hit = MISS
        self.calls: list[object] = []
        self.broken = False
        self.probes = 0
        self.gate: asyncio.Event | None = None

    def check(self, call: object) -> None:
        self.calls.append(call)
        if self.broken:
            raise InternalError("broken")

    async def offer(self, identity: IdentityKey, producer: AgentInfo, blocks: Sequence[OfferedBlock]) -> int:
        self.check((identity, producer, tuple(blocks)))
        return len(blocks)

    async def lookup(
        self, identity: IdentityKey, layout: LayoutSpec, blocks: Sequence[BlockKey], tenant: str = ""
    ) -> StoreHit:
        self.check((identity, layout, tuple(blocks), tenant))
        if self.gate is not None:
            await self.gate.wait()
        return self.hit

    def release(self, lease_ids: Sequence[str]) -> None:
        self.check(tuple(lease_ids))

    def info(self) -> WorkerInfo:
        return WorkerInfo("s", "b" * 32, "kv_store", "127.0.0.1:1", "m", IDENTITY, AGENT)

    def status(self) -> WorkerStatus:
        self.probes += 1
        if self.broken:
            raise InternalError("broken")
        return WorkerStatus("b" * 32)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
async def client(script: Script) -> AsyncIterator[KvStoreClient]:
    server = RpcServer()
    KvStoreServicer(script).add_to(server.server)
    made = KvStoreClient(f"127.0.0.1:{await server.start()}", IDENTITY, LAYOUT, probe_s=0.01)
    yield made
    await made.close()
    await server.stop()


def hit_of(num_blocks: int, *run_lengths: int) -> StoreHit:
    refs = [tuple(BlockRef(i, 1, (1, 2)) for i in range(n)) for n in run_lengths]
    runs = tuple(KvTransferParams("lease", AGENT, g, 0, blocks) for g, blocks in enumerate(refs))
    return StoreHit("lease", 30.0, num_blocks, runs)


async def test_a_lookup_asks_for_every_group_in_order(client: KvStoreClient, script: Script) -> None:
    script.hit = hit_of(2, 2, 2)
    assert await client.lookup(WANTED, "tenant") == script.hit
    keys = tuple(BlockKey(g, *b) for g in (0, 1) for b in WANTED)
    assert script.calls == [(IDENTITY, LAYOUT, keys, "tenant")]


@pytest.mark.parametrize("hit", [hit_of(2, 2), hit_of(2, 2, 1), hit_of(0, 0, 0)])
async def test_a_hit_that_is_not_whole_is_a_miss(
    client: KvStoreClient, script: Script, hit: StoreHit
) -> None:
    script.hit = hit
    assert await client.lookup(WANTED) == MISS


async def test_committed_blocks_are_offered_as_they_are(client: KvStoreClient, script: Script) -> None:
    ref = BlockRef(5, 7, (1, 2))
    block = CommittedBlock(1, 0, 5, b"h" * 32, b"p" * 32, (1, 2), (("p", 0),), ref, b"h" * 32, "tenant")
    assert await client.offer(AGENT, [block]) == 1
    key = BlockKey(1, b"h" * 32, b"p" * 32, (1, 2), (("p", 0),))
    assert script.calls == [(IDENTITY, AGENT, (OfferedBlock(key, ref, "tenant"),))]


async def test_nothing_to_say_makes_no_call(client: KvStoreClient, script: Script) -> None:
    assert await client.lookup([]) == MISS
    assert await client.offer(AGENT, []) == 0
    await client.release([])
    assert script.calls == []


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.001)


async def test_a_store_in_trouble_is_a_miss_and_left_alone_until_it_answers(
    client: KvStoreClient, script: Script
) -> None:
    script.broken = True
    assert await client.lookup(WANTED) == MISS
    assert client.paused
    await until(lambda: script.probes >= 3)
    await client.release(["lease"])
    assert await client.lookup(WANTED) == MISS
    assert client.paused and len(script.calls) == 1, "only probes reach it"
    script.broken, script.hit = False, hit_of(3, 3, 3)
    await until(lambda: not client.paused)
    assert (await client.lookup(WANTED)).num_blocks == 3
    await client.release(["lease"])
    assert script.calls[-1] == ("lease",)
    probes = script.probes
    script.broken = True
    await client.lookup(WANTED)
    await until(lambda: script.probes > probes)


async def test_a_store_that_is_gone_is_a_miss(free_port: int) -> None:
    client = KvStoreClient(f"127.0.0.1:{free_port}", IDENTITY, LAYOUT)
    assert await client.lookup(WANTED) == MISS
    assert client.paused
    assert await client.offer(AGENT, []) == 0
    await client.close()


async def test_failures_and_pauses_are_counted_for_each_node(client: KvStoreClient, script: Script) -> None:
    failures = metrics.STORE_NODE_FAILURES.labels(client.address, "lookup")
    pauses = metrics.STORE_NODE_PAUSES.labels(client.address)
    script.broken = True
    await asyncio.gather(client.lookup(WANTED), client.lookup(WANTED))
    assert (value(failures), value(pauses)) == (2, 1)
    script.broken = False
    await until(lambda: not client.paused)
    script.broken = True
    await client.lookup(WANTED)
    assert (value(failures), value(pauses)) == (3, 2)


async def test_what_is_too_much_for_one_call_is_not_asked(
    client: KvStoreClient, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.tiering.remote.MAX_LOOKED_UP", 5)
    await client.lookup(WANTED)
    keys = tuple(BlockKey(g, *b) for g in (0, 1) for b in WANTED[:2])
    assert script.calls == [(IDENTITY, LAYOUT, keys, "")]


async def test_closing_waits_for_calls_under_way_and_begins_none(
    client: KvStoreClient, script: Script
) -> None:
    script.gate, script.hit = asyncio.Event(), hit_of(3, 3, 3)
    asked = asyncio.create_task(client.lookup(WANTED))
    await until(lambda: bool(script.calls))
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    assert client.paused and not closing.done()
    script.gate.set()
    assert (await asked).num_blocks == 3
    await closing
    assert await client.lookup(WANTED) == MISS


def value(counter: Counter) -> float:
    return next(s.value for m in counter.collect() for s in m.samples if s.name.endswith("_total"))
