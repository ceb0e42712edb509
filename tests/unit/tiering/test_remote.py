"""A worker's client of the store, over a real gRPC server: every trouble is a miss."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest

from shared.clock import ManualClock
from shared.errors import InternalError
from shared.kv_cache.block_hash import HashedBlock
from shared.kv_cache.manager import CommittedBlock
from shared.rpc.kv_store import KvStoreServicer
from shared.rpc.server import RpcServer
from shared.tiering.remote import MISS, PAUSE_S, KvStoreClient
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

    def check(self, call: object) -> None:
        self.calls.append(call)
        if self.broken:
            raise InternalError("broken")

    async def offer(self, identity: IdentityKey, producer: AgentInfo, blocks: Sequence[OfferedBlock]) -> int:
        self.check((identity, producer, tuple(blocks)))
        return len(blocks)

    async def lookup(self, identity: IdentityKey, layout: LayoutSpec, blocks: Sequence[BlockKey]) -> StoreHit:
        self.check((identity, layout, tuple(blocks)))
        return self.hit

    def release(self, lease_ids: Sequence[str]) -> None:
        self.check(tuple(lease_ids))

    def info(self) -> WorkerInfo:
        return WorkerInfo("s", "b" * 32, "kv_store", "", "m", IDENTITY, AGENT)

    def status(self) -> WorkerStatus:
        return WorkerStatus("b" * 32)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
async def client(script: Script, clock: ManualClock) -> AsyncIterator[KvStoreClient]:
    server = RpcServer()
    KvStoreServicer(script).add_to(server.server)
    made = KvStoreClient(f"127.0.0.1:{await server.start()}", IDENTITY, LAYOUT, clock)
    yield made
    await made.close()
    await server.stop()


def hit_of(num_blocks: int, *run_lengths: int) -> StoreHit:
    refs = [tuple(BlockRef(i, 1, (1, 2)) for i in range(n)) for n in run_lengths]
    runs = tuple(KvTransferParams("lease", AGENT, g, 0, blocks) for g, blocks in enumerate(refs))
    return StoreHit("lease", 30.0, num_blocks, runs)


async def test_a_lookup_asks_for_every_group_in_order(client: KvStoreClient, script: Script) -> None:
    script.hit = hit_of(2, 2, 2)
    assert await client.lookup(WANTED) == script.hit
    keys = tuple(BlockKey(g, *b) for g in (0, 1) for b in WANTED)
    assert script.calls == [(IDENTITY, LAYOUT, keys)]


@pytest.mark.parametrize("hit", [hit_of(2, 2), hit_of(2, 2, 1), hit_of(0, 0, 0)])
async def test_a_hit_that_is_not_whole_is_a_miss(
    client: KvStoreClient, script: Script, hit: StoreHit
) -> None:
    script.hit = hit
    assert await client.lookup(WANTED) == MISS


async def test_committed_blocks_are_offered_as_they_are(client: KvStoreClient, script: Script) -> None:
    ref = BlockRef(5, 7, (1, 2))
    block = CommittedBlock(1, 0, 5, b"h" * 32, b"p" * 32, (1, 2), (("p", 0),), ref)
    assert await client.offer(AGENT, [block]) == 1
    key = BlockKey(1, b"h" * 32, b"p" * 32, (1, 2), (("p", 0),))
    assert script.calls == [(IDENTITY, AGENT, (OfferedBlock(key, ref),))]


async def test_nothing_to_say_makes_no_call(client: KvStoreClient, script: Script) -> None:
    assert await client.lookup([]) == MISS
    assert await client.offer(AGENT, []) == 0
    await client.release([])
    assert script.calls == []


async def test_a_store_in_trouble_is_a_miss_and_left_alone_for_a_while(
    client: KvStoreClient, script: Script, clock: ManualClock
) -> None:
    script.broken = True
    assert await client.lookup(WANTED) == MISS
    assert client.paused
    await client.release(["lease"])
    assert await client.lookup(WANTED) == MISS
    assert len(script.calls) == 1
    clock.advance(PAUSE_S)
    script.broken, script.hit = False, hit_of(3, 3, 3)
    assert (await client.lookup(WANTED)).num_blocks == 3
    await client.release(["lease"])
    assert script.calls[-1] == ("lease",)


async def test_a_store_that_is_gone_is_a_miss(clock: ManualClock, free_port: int) -> None:
    client = KvStoreClient(f"127.0.0.1:{free_port}", IDENTITY, LAYOUT, clock)
    assert await client.lookup(WANTED) == MISS
    assert await client.offer(AGENT, []) == 0
    await client.close()
