"""Blocks of other sizes and other ranks, byte by byte against one plain array; over a wire without faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as hostile

from shared.errors import TransferError
from shared.failpoints import Failpoints
from shared.transfer.arena import Arena
from shared.transfer.handoff import (
    SCRATCH,
    SCRATCH_BYTES,
    BlockPull,
    DirectPull,
    Pull,
    PullProtocol,
    Reslice,
)
from shared.transfer.reslice import NUM_STAGES, STAGE, StagedPull, overlaps, runs
from shared.transfer.shards import shards, spans
from shared.types.kv import KVGroupSpec
from shared.types.transfer import AgentInfo, BlockRef
from tests.fakes.ranks import RankedMemory, converting_pull, stream

GROUP = KVGroupSpec(3, 4, 5, "float16")
NUM_BLOCKS = 24


class Wire:
    """Both memories in this process: reads are done by hand, each exactly once, and counted by byte."""

    def __init__(self, source: RankedMemory, target: RankedMemory) -> None:
        self.source, self.target = source, target
        self.scratch = Arena.create(SCRATCH, (NUM_STAGES,), (SCRATCH_BYTES,), "b" * 32)
        self.local = {**target.arenas, SCRATCH: self.scratch}
        self.writes: Counter[tuple[str, int]] = Counter()

    @property
    def info(self) -> AgentInfo:
        regions = tuple(arena.info for name, arena in self.source.arenas.items() if name != STAGE)
        return AgentInfo("p", "a" * 32, 0, (), regions, self.source.layout)

    def protocol(self, pull: Pull, *, verify: bool = True) -> PullProtocol:
        kind = DirectPull if pull.reslice is None else StagedPull
        return kind(pull, self.target.arenas, self.scratch, 1, Failpoints(), verify=verify)

    def run(self, pull: Pull, **options: bool) -> PullProtocol:
        protocol = self.protocol(pull, **options)
        for remote, local, ops, _ in protocol.steps():
            for op in ops:
                data = self.source.arenas[remote].buffer[op.remote_offset :][: op.nbytes]
                self.local[local].buffer[op.local_offset : op.local_offset + op.nbytes] = data
                if local.startswith("kv"):
                    self.writes.update((local, op.local_offset + i) for i in range(op.nbytes))
        return protocol

    def close(self) -> None:
        self.source.close()
        self.target.close()
        self.scratch.close()


@pytest.fixture
def wires() -> Iterator[Any]:
    made: list[Wire] = []

    def make(theirs: int, their_ranks: int, ours: int, our_ranks: int, group: KVGroupSpec = GROUP) -> Wire:
        source = RankedMemory([group], theirs, their_ranks, NUM_BLOCKS)
        made.append(Wire(source, RankedMemory([group], ours, our_ranks, NUM_BLOCKS, "b" * 32)))
        return made[-1]

    yield make
    for wire in made:
        wire.close()


SIZES = st.sampled_from([(4, 4), (4, 8), (8, 4), (2, 12), (12, 2), (1, 3), (3, 1)])


@settings(max_examples=60, deadline=None)
@given(
    sizes=SIZES,
    their_ranks=st.sampled_from([1, 2, 4]),
    our_ranks=st.sampled_from([1, 2, 4]),
    num_tokens=st.integers(1, 24),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_every_byte_comes_from_where_the_plain_array_has_it(
    sizes: tuple[int, int], their_ranks: int, our_ranks: int, num_tokens: int, seed: int, data: st.DataObject
) -> None:
    theirs, ours = sizes
    source = RankedMemory([GROUP], theirs, their_ranks, NUM_BLOCKS)
    wire = Wire(source, RankedMemory([GROUP], ours, our_ranks, NUM_BLOCKS, "b" * 32))
    try:
        rng = np.random.default_rng(seed)
        kv = stream(GROUP, num_tokens, seed)
        table = rng.permutation(NUM_BLOCKS)[: -(-num_tokens // ours)].tolist()
        refs = source.commit_all(0, rng.permutation(NUM_BLOCKS)[: -(-num_tokens // theirs)].tolist(), kv)
        held = data.draw(st.integers(0, len(table) - 1)) if theirs != ours else 0
        pull = converting_pull(
            "1", source, wire.info, refs, wire.target, table, num_tokens, 0, range(held, len(table))
        )
        before = [wire.target.block(0, block_id) for block_id in range(NUM_BLOCKS)]
        protocol = wire.run(pull)
        assert protocol.reason == "" and all(protocol.ok)
        for index, block_id in enumerate(table[held:], held):
            wanted = kv[:, :, index * ours : (index + 1) * ours]
            assert np.array_equal(wire.target.block(0, block_id)[:, :, : wanted.shape[2]], wanted)
        for block_id in set(range(NUM_BLOCKS)) - set(table[held:]):
            assert np.array_equal(wire.target.block(0, block_id), before[block_id])
        check_new_checksums(wire, pull, protocol)
        if pull.reslice is None:
            size = GROUP.extent_bytes(ours) * len(table)
            assert len(wire.writes) == size and set(wire.writes.values()) == {1}
        else:
            assert not wire.writes, "the stage alone is read into"
    finally:
        wire.close()


def check_new_checksums(wire: Wire, pull: Pull, protocol: PullProtocol) -> None:
    """What is made anew is sealed from our memory, with one checksum a head of the whole model."""
    if pull.reslice is None:
        assert protocol.made == ()
        return
    probe = RankedMemory([GROUP], wire.target.block_size, 1, NUM_BLOCKS)
    for block_id, sums in zip(pull.reslice.into, protocol.made, strict=True):
        if block_id < 0:
            assert sums == ()
        else:
            assert sums == probe.commit(0, block_id, wire.target.block(0, block_id)).checksums
    probe.close()


@given(theirs=st.integers(1, 40), times=st.integers(1, 6), swap=st.booleans(), data=st.data())
def test_overlaps_give_every_token_its_place_once(
    theirs: int, times: int, swap: bool, data: st.DataObject
) -> None:
    ours = theirs * times
    if swap:
        theirs, ours = ours, theirs
    count = data.draw(st.integers(1, 6))
    into = tuple(data.draw(st.lists(st.sampled_from([-1, 7]), min_size=count, max_size=count)))
    reslice = Reslice(theirs, ours, 1, into)
    seen: Counter[tuple[int, int]] = Counter()
    for place in range(-(-count * ours // theirs)):
        for target, source_token, target_token, num_tokens in overlaps(reslice, place):
            for i in range(num_tokens):
                assert place * theirs + source_token + i == target * ours + target_token + i
                assert source_token + i < theirs and target_token + i < ours
                seen[target, target_token + i] += 1
    kept = {target for target, block_id in enumerate(into) if block_id >= 0}
    assert seen == {(target, token): 1 for target in kept for token in range(ours)}


@given(num_blocks=st.integers(0, 9), num_heads=st.integers(1, 9), capacity=st.integers(1, 20))
def test_runs_hold_every_head_once_and_never_too_many(num_blocks: int, num_heads: int, capacity: int) -> None:
    heads: list[tuple[int, int]] = []
    for run in runs(num_blocks, num_heads, capacity):
        places = [piece.at + i for piece in run for i in range(piece.num_heads)]
        assert places == list(range(len(places))) and 0 < len(places) <= capacity
        heads += [(piece.block, piece.first_head + i) for piece in run for i in range(piece.num_heads)]
    assert heads == [(block, head) for block in range(num_blocks) for head in range(num_heads)]


@given(
    num_heads=st.sampled_from([1, 2, 4, 6, 12]),
    their_ranks=st.integers(1, 12),
    our_ranks=st.integers(1, 12),
    extent=st.sampled_from([12, 24]),
)
def test_spans_hold_every_head_once(num_heads: int, their_ranks: int, our_ranks: int, extent: int) -> None:
    sides = []
    for num_ranks in (their_ranks, our_ranks):
        regions = [
            Arena.create("kv", (1,), (max(1, num_heads * extent // num_ranks),), "a" * 32)
            for _ in range(num_ranks)
        ]
        infos = [arena.info for arena in regions]
        for arena in regions:
            arena.close()
        if num_heads % num_ranks:
            with pytest.raises(TransferError):
                shards(infos, 0, num_heads)
            return
        sides.append(shards(infos, 0, num_heads))
    found: list[tuple[int, int]] = []
    for span in spans(*sides):
        places = []
        for shard_list, region, at in zip(
            sides, (span.source, span.target), (span.source_at, span.target_at), strict=True
        ):
            (shard,) = [shard for shard in shard_list if shard.region is region]
            assert at + span.nbytes <= region.extent_bytes[0]
            places.append(shard.first_head * extent + at)
        assert places[0] == places[1]
        found.append((places[0], span.nbytes))
    at = 0
    for begin, nbytes in sorted(found):
        assert begin == at
        at += nbytes
    assert at == num_heads * extent


def test_heads_of_unequal_size_have_nothing_in_common() -> None:
    one, other = (RankedMemory([GROUP], size, 1, 1) for size in (4, 8))
    with pytest.raises(TransferError, match="differ in size"):
        spans(shards([one.ranks[0].info], 0, 4), shards([other.ranks[0].info], 0, 4))
    one.close()
    other.close()


def test_a_head_larger_than_a_run_goes_through_alone(wires: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With runs of one head, of several, and of parts of blocks."""
    head_bytes = GROUP.head_bytes(8)
    for run_bytes in (1, head_bytes, 3 * head_bytes, 5 * head_bytes):
        monkeypatch.setattr("shared.transfer.reslice._RUN_BYTES", run_bytes)
        wire = wires(8, 2, 4, 4)
        kv = stream(GROUP, 29, run_bytes)
        refs = wire.source.commit_all(0, [3, 0, 9, 5], kv)
        table = list(range(8))
        protocol = wire.run(converting_pull("1", wire.source, wire.info, refs, wire.target, table, 29))
        assert all(protocol.ok) and protocol.nbytes == 4 * GROUP.extent_bytes(8)
        for index in range(8):
            wanted = kv[:, :, index * 4 : index * 4 + 4]
            assert np.array_equal(wire.target.block(0, index)[:, :, : wanted.shape[2]], wanted)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("theirs", "ours"), [(4, 4), (4, 8), (8, 4)])
def test_what_one_rank_says_of_a_block_counts_for_all(wires: Any, theirs: int, ours: int, rank: int) -> None:
    """A block that one rank reused, or whose heads one rank damaged, is no block of ours."""
    for harm, reason in (("reuse", "stale"), ("flip", "corrupt")):
        wire = wires(theirs, 2, ours, 1)
        refs = wire.source.commit_all(0, [2, 7, 4, 1], stream(GROUP, 4 * theirs, 1))
        if harm == "reuse":
            wire.source.ranks[rank].generations(0)[7] += 1
        else:
            wire.source.ranks[rank].block(0, 7)[-1] ^= 1
        table = list(range(4 * theirs // ours))
        pull = converting_pull("1", wire.source, wire.info, refs, wire.target, table, 4 * theirs)
        protocol = wire.run(pull)
        assert (protocol.ok, protocol.reason) == ([True, False, True, True], reason)
        assert protocol.nbytes == 3 * GROUP.extent_bytes(theirs)
        if theirs != ours:
            lost = {i for i in table if max(i * ours, theirs) < min((i + 1) * ours, 2 * theirs)}
            assert {i for i in table if not protocol.made[i]} == lost
        # The control: without verification nobody sees the flip.
        assert wire.run(pull, verify=False).reason == ("stale" if harm == "reuse" else "")


def test_a_rank_of_an_older_epoch_is_stale(wires: Any) -> None:
    wire = wires(4, 2, 4, 1)
    refs = wire.source.commit_all(0, [0], stream(GROUP, 4, 1))
    wire.source.ranks[1].set_epoch(3)
    pull = converting_pull("1", wire.source, wire.info, refs, wire.target, [0], 4)
    assert wire.run(pull).reason == "stale"


def test_numbers_that_cannot_be_are_refused_with_nothing_written(wires: Any) -> None:
    wire = wires(8, 2, 4, 1)
    refs = wire.source.commit_all(0, [0, 1], stream(GROUP, 16, 1))
    good = converting_pull("1", wire.source, wire.info, refs, wire.target, [0, 1, 2, 3], 16)
    reslice, (first, second) = good.reslice, good.blocks
    assert reslice is not None
    regions = good.producer.regions

    def resliced(**changes: Any) -> Pull:
        return hostile(good, reslice=hostile(reslice, **changes))

    def producer(*given: Any) -> AgentInfo:
        return AgentInfo("p", "a" * 32, 0, (), tuple(given))

    for bad in (
        resliced(source_tokens=0),
        resliced(source_tokens=-8),
        resliced(target_tokens=0),
        resliced(source_tokens=6),
        resliced(source_tokens=16),
        resliced(source_tokens=4),
        resliced(source_tokens=1 << 40),
        resliced(num_planes=0),
        resliced(num_planes=7),
        resliced(into=()),
        resliced(into=(0, 1, 2, NUM_BLOCKS)),
        resliced(into=(0, 1, 2, -2)),
        resliced(into=(0,)),
        hostile(good, reslice=None),
        hostile(good, blocks=()),
        hostile(good, blocks=(first, BlockPull(second.remote, 2))),
        hostile(good, blocks=(first, BlockPull(second.remote, -1))),
        hostile(good, blocks=(BlockPull(BlockRef(NUM_BLOCKS, 1, ()), 0),)),
        hostile(good, blocks=(BlockPull(BlockRef(-1, 1, ()), 0),)),
        hostile(good, checksum_heads=0),
        hostile(good, checksum_heads=-4),
        hostile(good, checksum_heads=3),
        hostile(good, group=1),
        hostile(good, group=-1),
        hostile(good, region="ec"),
        hostile(good, producer=producer()),
        hostile(good, producer=producer(regions[1])),
        hostile(good, producer=producer(regions[0])),
        hostile(good, producer=producer(regions[0], hostile(regions[1], extent_bytes=(8,)))),
        hostile(good, producer=producer(regions[0], hostile(regions[1], num_blocks=(1,)))),
        hostile(good, producer=producer(regions[0], hostile(regions[1], num_blocks=()))),
    ):
        with pytest.raises(TransferError):
            wire.protocol(bad)
    no_stage = {name: arena for name, arena in wire.target.arenas.items() if name != STAGE}
    with pytest.raises(TransferError):
        StagedPull(good, no_stage, wire.scratch, 0, Failpoints(), verify=True)
    assert not any(any(wire.target.block(0, i).tobytes()) for i in range(NUM_BLOCKS))
    assert all(wire.run(good).ok)


@pytest.mark.parametrize("count", [0, 3, 5])
def test_too_few_or_too_many_checksums_are_corrupt(wires: Any, count: int) -> None:
    for theirs, ours in ((8, 4), (4, 4)):
        wire = wires(theirs, 1, ours, 2)
        (ref,) = wire.source.commit_all(0, [0], stream(GROUP, theirs, 1))
        other = BlockRef(0, ref.generation, (*ref.checksums, 5)[:count])
        table = list(range(theirs // ours))
        pull = converting_pull("1", wire.source, wire.info, [other], wire.target, table, theirs)
        assert wire.run(pull).reason == "corrupt"
