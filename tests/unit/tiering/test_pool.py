"""Several nodes as one pool, over scripted nodes: who is asked, and what their answers make together."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.kv_cache.block_hash import HashedBlock
from shared.kv_cache.manager import CommittedBlock
from shared.kv_cache.segments import WantedBlock
from shared.tiering.nodes import NodeLease
from shared.tiering.pool import NO_HIT, PoolHit, StorePool
from shared.tiering.remote import MISS
from shared.tiering.rendezvous import ranked
from shared.types.store import StoreHit
from shared.types.transfer import AgentInfo, BlockRef, KvTransferParams

WORKER = AgentInfo("w", "i", 1, (), ())
NAMES = ("a:1", "b:2", "c:3")
NUM_GROUPS = 2


class Node:
    """Holds blocks of these numbers; ``fails`` pauses it at the next call, as a client does."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.held: set[int] = set()
        self.paused = self.fails = self.closed = False
        self.lookups: list[list[int]] = []
        self.tenants: set[str] = set()
        self.offers: list[list[int]] = []
        self.released: list[str] = []
        self.gate: asyncio.Event | None = None

    async def lookup(self, wanted: Sequence[HashedBlock], tenant: str) -> StoreHit:
        if self.paused:
            return MISS
        self.tenants.add(tenant)
        numbers = [number(block) for block in wanted]
        self.lookups.append(numbers)
        await self._answering()
        found = 0
        while not self.paused and found < len(numbers) and numbers[found] in self.held:
            found += 1
        if not found:
            return MISS
        lease = f"{self.name}/{len(self.lookups)}"
        producer = AgentInfo(self.name, "i", 1, (), ())
        runs = [
            KvTransferParams(lease, producer, g, 0, tuple(BlockRef(n, g, ()) for n in numbers[:found]))
            for g in range(NUM_GROUPS)
        ]
        return StoreHit(lease, 1.0, found, tuple(runs))

    async def offer(self, producer: AgentInfo, blocks: Sequence[CommittedBlock]) -> int:
        self.offers.append([block.index for block in blocks])
        await self._answering()
        return 0 if self.paused else len(blocks)

    async def release(self, lease_ids: Sequence[str]) -> None:
        self.released += lease_ids

    async def close(self) -> None:
        self.closed = True

    async def _answering(self) -> None:
        self.paused = self.paused or self.fails
        await (self.gate.wait() if self.gate is not None else asyncio.sleep(0))


class Bench:
    """A pool of scripted nodes."""

    def __init__(self, names: Sequence[str] = NAMES, replicas: int = 1) -> None:
        self.nodes: dict[str, Node] = {}
        self.replicas = replicas
        self.pool = StorePool(self._connect, names, replicas)

    def _connect(self, name: str) -> Node:
        return self.nodes.setdefault(name, Node(name))

    def homes(self, segment: int) -> list[Node]:
        live = [name for name, node in self.nodes.items() if not node.paused]
        return [self.nodes[name] for name in ranked(live, key(segment))[: self.replicas]]

    def fill(self, wanted: Sequence[WantedBlock]) -> None:
        """Give every block to the nodes that it belongs to."""
        for want in wanted:
            for node in self.homes(want.segment[0]):
                node.held.add(number(want.block))


def key(segment: int) -> bytes:
    """Like a hash, but its first byte tells the segment."""
    return bytes([segment]) + hashlib.sha256(bytes([segment])).digest()[1:]


def number(block: HashedBlock) -> int:
    return int.from_bytes(block.block_hash, "big")


def wanted_of(*lengths: int) -> list[WantedBlock]:
    """Consecutive blocks 0, 1, ... in segments of these lengths."""
    segments = [segment for segment, length in enumerate(lengths) for _ in range(length)]
    return [
        WantedBlock(key(segment), HashedBlock(n.to_bytes(32, "big"), b"", (), ()))
        for n, segment in enumerate(segments)
    ]


def check_runs(hit: PoolHit) -> None:
    """Each group has each of the leading blocks once, in its place, from a producer that holds a lease."""
    leased = {(lease.node, lease.lease_id) for lease in hit.leases}
    for group in range(NUM_GROUPS):
        runs = [run for run in hit.runs if run.group == group]
        places = [
            (run.first + i, ref.block_id, ref.generation) for run in runs for i, ref in enumerate(run.blocks)
        ]
        assert places == [(n, n, group) for n in range(hit.num_blocks)]
        assert all((run.producer.worker_id, run.handoff_id) in leased for run in runs)


async def test_a_prefix_over_several_segments_is_one_hit_of_several_nodes() -> None:
    bench, wanted = Bench(), wanted_of(64, 64, 64, 8)
    bench.fill(wanted)
    hit = await bench.pool.lookup(wanted, "tenant")
    assert hit.num_blocks == 200
    check_runs(hit)
    homes = {bench.homes(segment)[0].name for segment in range(4)}
    assert len(homes) > 1 and {run.producer.worker_id for run in hit.runs} == homes
    assert all(len(node.lookups) == (node.name in homes) for node in bench.nodes.values()), "one call a node"
    assert set().union(*(node.tenants for node in bench.nodes.values())) == {"tenant"}
    await bench.pool.release(hit.leases)
    assert sorted(lease.lease_id for lease in hit.leases) == sorted(
        lease_id for node in bench.nodes.values() for lease_id in node.released
    )


async def test_nodes_are_asked_at_once() -> None:
    bench, wanted = Bench(), wanted_of(*[2] * 12)
    bench.fill(wanted)
    for node in bench.nodes.values():
        node.gate = asyncio.Event()
    asked = asyncio.create_task(bench.pool.lookup(wanted))
    for _ in range(10):
        await asyncio.sleep(0)
    assert [len(node.lookups) for node in bench.nodes.values()] == [1, 1, 1], "none has answered yet"
    for node in bench.nodes.values():
        assert node.gate is not None
        node.gate.set()
    assert (await asked).num_blocks == 24


async def test_the_prefix_ends_where_a_node_does_not_answer_and_the_rest_is_given_back() -> None:
    bench, wanted = Bench(), wanted_of(*[4] * 8)
    bench.fill(wanted)
    broken = bench.homes(2)[0]
    broken.fails = True
    first = next(i for i in range(8) if bench.homes(i)[0] is broken)
    hit = await bench.pool.lookup(wanted)
    assert hit.num_blocks == 4 * first
    check_runs(hit)
    assert broken.paused
    # Now its segments belong to the next node by weight: what that is offered, is found.
    bench.fill(wanted)
    assert (await bench.pool.lookup(wanted)).num_blocks == 32
    # It is back, with what it held.
    broken.paused = broken.fails = False
    hit = await bench.pool.lookup(wanted)
    assert hit.num_blocks == 32 and broken.name in {run.producer.worker_id for run in hit.runs}


async def test_an_offer_goes_to_the_nodes_of_its_segment() -> None:
    for replicas in (1, 2):
        bench = Bench(replicas=replicas)
        blocks = [
            CommittedBlock(0, n, n, b"", b"", (), (), BlockRef(n, 1, ()), key(n // 3)) for n in range(30)
        ]
        assert await bench.pool.offer(WORKER, blocks) == 30 * replicas
        for segment in range(10):
            offered = [3 * segment, 3 * segment + 1, 3 * segment + 2]
            holders = [n for n in bench.nodes.values() if set(offered) <= {i for o in n.offers for i in o}]
            assert {node.name for node in holders} == {node.name for node in bench.homes(segment)}
        assert all(
            len(node.offers) == 1 and node.offers[0] == sorted(node.offers[0])
            for node in bench.nodes.values()
        )


async def test_a_copy_is_found_when_the_first_node_is_gone_slow_or_empty() -> None:
    wanted = wanted_of(*[4] * 8)
    for trouble in ("paused", "fails", "empty"):
        bench = Bench(replicas=2)
        bench.fill(wanted)
        node = bench.homes(0)[0]
        if trouble == "empty":
            node.held.clear()
        else:
            setattr(node, trouble, True)
        hit = await bench.pool.lookup(wanted)
        assert hit.num_blocks == 32, trouble
        check_runs(hit)
        assert node.name not in {run.producer.worker_id for run in hit.runs}


async def test_without_trouble_the_second_node_is_not_asked() -> None:
    bench, wanted = Bench(replicas=2), wanted_of(4)
    bench.fill(wanted)
    await bench.pool.lookup(wanted)
    assert [len(node.lookups) for node in bench.homes(0)] == [1, 0]


async def test_a_pool_without_a_node_that_answers_is_a_miss() -> None:
    bench = Bench(names=())
    assert not bench.pool.usable
    assert await bench.pool.lookup(wanted_of(3)) == NO_HIT
    bench = Bench()
    for node in bench.nodes.values():
        assert bench.pool.usable
        node.paused = True
    assert not bench.pool.usable
    assert await bench.pool.lookup(wanted_of(3)) == NO_HIT
    assert (
        await bench.pool.offer(
            WORKER, [CommittedBlock(0, 0, 0, b"", b"", (), (), BlockRef(0, 1, ()), key(0))]
        )
        == 0
    )


async def test_nodes_come_and_go() -> None:
    bench = Bench(names=("a:1", "b:2"))
    kept, gone = bench.nodes["a:1"], bench.nodes["b:2"]
    await bench.pool.set_addresses(("c:3", "a:1"))
    assert bench.pool.addresses == {"a:1", "c:3"}
    assert gone.closed and not kept.closed
    await bench.pool.release([NodeLease("b:2", "x"), NodeLease("a:1", "y")])
    assert (gone.released, kept.released) == ([], ["y"])
    await bench.pool.close()
    assert kept.closed and bench.nodes["c:3"].closed


async def test_a_node_that_goes_while_it_is_asked_ends_that_look_up_well() -> None:
    bench, wanted = Bench(names=("a:1",)), wanted_of(2)
    bench.fill(wanted)
    node = bench.nodes["a:1"]
    node.gate = asyncio.Event()
    asked = asyncio.create_task(bench.pool.lookup(wanted))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await bench.pool.set_addresses(())
    node.gate.set()
    assert (await asked).num_blocks == 2


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.lists(st.sets(st.integers(0, 29)), min_size=3, max_size=3),
    st.sets(st.sampled_from(NAMES)),
    st.sampled_from((1, 2)),
)
def test_a_hit_is_always_whole_and_true(
    lengths: list[int], held: list[set[int]], failing: set[str], replicas: int
) -> None:
    """Whatever the nodes hold, and whoever fails: every block of a hit is in a hit of its own home."""
    bench, wanted = Bench(replicas=replicas), wanted_of(*lengths)
    homes = {segment: [node.name for node in bench.homes(segment)] for segment in range(len(lengths))}
    for node, numbers in zip(bench.nodes.values(), held, strict=True):
        node.held, node.fails = numbers, node.name in failing
    hit = asyncio.run(bench.pool.lookup(wanted))
    check_runs(hit)
    for run in hit.runs:
        name = run.producer.worker_id
        assert name not in failing
        for n in range(run.first, run.first + len(run.blocks)):
            assert n in bench.nodes[name].held and name in homes[wanted[n].segment[0]]
    # As long as it can be without copies, which may only make it longer.
    firsts = [bench.nodes[homes[want.segment[0]][0]] for want in wanted]
    there = [not node.fails and n in node.held for n, node in enumerate(firsts)]
    alone = (*there, False).index(False)
    assert hit.num_blocks == alone if replicas == 1 else hit.num_blocks >= alone
