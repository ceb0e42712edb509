"""Pulls between workers of other block sizes and ranks, over every backend, with and without faults."""

from __future__ import annotations

import itertools
import queue
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from shared.clock import ManualClock
from shared.transfer.faulty import Fault, FaultKind, FaultyBackend
from shared.transfer.handoff import Pull, PullOutcome
from shared.types.kv import KVGroupSpec
from shared.types.transfer import BlockRef
from tests.contract.transfer.peer import make_backend
from tests.fakes.ranks import PATIENCE_S, RankedMemory, Side, converting_pull, stream

GROUPS = (KVGroupSpec(1, 4, 8, "float32"), KVGroupSpec(2, 4, 4, "uint64"))
NUM_BLOCKS = 24
NUM_TOKENS = 43
#: Block size and ranks there, block size and ranks here.
SHAPES = [(16, 1, 16, 2), (16, 2, 16, 1), (16, 4, 16, 2), (4, 1, 8, 1), (8, 2, 4, 1), (4, 1, 16, 4)]


class Pair:
    """A producer and a reader in this process. ``faults`` counts the reader's reads from 0."""

    def __init__(
        self, backend: str, shape: tuple[int, int, int, int], faults: Mapping[int, Fault], **puller: Any
    ) -> None:
        theirs, their_ranks, ours, our_ranks = shape
        self.injected: queue.Queue[Fault] = queue.Queue()
        names = [f"{name}-{id(self)}" for name in ("producer", "reader")]
        there = RankedMemory(GROUPS, theirs, their_ranks, NUM_BLOCKS, "a" * 32)
        here = RankedMemory(GROUPS, ours, our_ranks, NUM_BLOCKS, "b" * 32)
        self.producer = Side("producer", there, make_backend(backend, names[0]))
        self.faulty = FaultyBackend(make_backend(backend, names[1]), faults, injected=self.injected.put)
        self.reader = Side("reader", here, self.faulty, **puller)
        self._ids = itertools.count()

    def commit(self, group: int, seed: int) -> tuple[np.ndarray[Any, Any], list[BlockRef]]:
        memory = self.producer.memory
        kv = stream(GROUPS[group], NUM_TOKENS, seed)
        return kv, memory.commit_all(group, range(-(-NUM_TOKENS // memory.block_size)), kv)

    def pull_of(self, group: int, refs: list[BlockRef], table: list[int]) -> Pull:
        there, here = self.producer, self.reader.memory
        name = f"pull-{next(self._ids)}"
        return converting_pull(name, there.memory, there.info, refs, here, table, NUM_TOKENS, group)

    def table(self, first: int = 0) -> list[int]:
        return list(range(first, first + -(-NUM_TOKENS // self.reader.memory.block_size)))

    def landed(self, pull: Pull, outcome: PullOutcome) -> list[bool]:
        """Which blocks of the table the outcome says are good."""
        if pull.reslice is None:
            return list(outcome.ok)
        return [bool(sums) for sums in outcome.made or [()] * len(pull.reslice.into)]

    def is_right(self, group: int, kv: np.ndarray[Any, Any], table: list[int], index: int) -> bool:
        size = self.reader.memory.block_size
        wanted = kv[:, :, index * size : (index + 1) * size]
        return np.array_equal(self.reader.memory.block(group, table[index])[:, :, : wanted.shape[2]], wanted)

    def close(self) -> None:
        self.reader.close()
        self.producer.close()


@pytest.fixture
def pair(backend: str) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(
        shape: tuple[int, int, int, int], faults: Mapping[int, Fault] | None = None, **puller: Any
    ) -> Pair:
        made.append(Pair(backend, shape, faults or {}, **puller))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("shape", SHAPES)
def test_every_group_arrives_in_our_shape(
    shape: tuple[int, int, int, int], pair: Callable[..., Pair]
) -> None:
    both = pair(shape)
    for group in (0, 1):
        kv, refs = both.commit(group, seed=group)
        table = both.table(first=5)
        pull = both.pull_of(group, refs, table)
        outcome = both.reader.pull(pull)
        assert (outcome.reason, outcome.terminal) == ("", True)
        assert outcome.nbytes == len(refs) * GROUPS[group].extent_bytes(shape[0])
        assert all(both.landed(pull, outcome))
        assert all(both.is_right(group, kv, table, index) for index in range(len(table)))


@pytest.mark.parametrize("shape", SHAPES)
def test_no_fault_of_the_wire_gives_a_wrong_block(
    shape: tuple[int, int, int, int], pair: Callable[..., Pair], backend: str
) -> None:
    """A random fault somewhere in each of many pulls: what is called good is right, byte for byte."""
    rnd = random.Random(f"{shape} {backend}")
    kinds = [FaultKind.TRUNCATE, FaultKind.FLIP, FaultKind.DELAY, FaultKind.FAIL]
    # A pull takes a handful of reads; every third is hit.
    faults = {
        number: Fault(kind, rnd.randrange(1, 6 if kind is FaultKind.DELAY else 3000))
        for number in range(0, 400, 3)
        for kind in [rnd.choice(kinds)]
    }
    both = pair(shape, faults)
    reasons, good = set(), 0
    for seed in range(30):
        kv, refs = both.commit(0, seed)
        table = both.table(first=rnd.randrange(4))
        pull = both.pull_of(0, refs, table)
        outcome = both.reader.pull(pull)
        reasons.add(outcome.reason)
        for index, landed in enumerate(both.landed(pull, outcome)):
            good += landed
            assert not landed or both.is_right(0, kv, table, index)
    assert both.injected.qsize() > 20 and good > 0
    assert {"corrupt", "stale", "peer_lost"} & reasons


@pytest.mark.parametrize("shape", SHAPES)
def test_an_answered_pull_writes_nothing_any_more(
    shape: tuple[int, int, int, int], pair: Callable[..., Pair]
) -> None:
    """Cancelled while the last of its blocks are on their way: what lands late stays in the stage."""
    theirs, their_ranks, ours, our_ranks = shape
    num_reads = their_ranks if theirs != ours else max(their_ranks, our_ranks)
    last = their_ranks + num_reads - 1
    both = pair(shape, {last: Fault(FaultKind.FREEZE, 40)})
    _, refs = both.commit(0, seed=3)
    table = both.table()
    before = [both.reader.memory.block(0, block_id) for block_id in table]
    pull = both.pull_of(0, refs, table)
    both.reader.puller.submit(pull)
    both.injected.get(timeout=PATIENCE_S)
    both.reader.puller.cancel(pull.pull_id)
    outcome = both.reader.outcomes.get(timeout=PATIENCE_S)
    assert (outcome.reason, outcome.terminal, outcome.made) == ("cancelled", False, ())
    assert both.reader.settled.get(timeout=PATIENCE_S) == pull.pull_id
    after = [both.reader.memory.block(0, block_id) for block_id in table]
    assert np.array_equal(before, after) == (theirs != ours)
    again = both.pull_of(0, refs, table)
    assert both.reader.pull(again).reason == ""


def test_a_dropped_read_into_the_stage_times_out_and_gives_the_stage_back(pair: Callable[..., Pair]) -> None:
    clock = ManualClock()
    both = pair((4, 2, 8, 1), {i: Fault(FaultKind.DROP) for i in range(2, 5 * 3, 3)}, clock=clock)
    kv, refs = both.commit(0, seed=1)
    for _ in range(5):
        # More pulls than there are stages, one after the other.
        pull = both.pull_of(0, refs, both.table())
        both.reader.puller.submit(pull)
        both.injected.get(timeout=PATIENCE_S)
        clock.advance(PATIENCE_S)
        outcome = both.reader.outcomes.get(timeout=PATIENCE_S)
        assert (outcome.reason, outcome.terminal) == ("timeout", False)
        assert both.reader.settled.get(timeout=PATIENCE_S) == pull.pull_id
    assert both.reader.pull(both.pull_of(0, refs, both.table())).reason == ""
    assert both.is_right(0, kv, both.table(), 0)


def test_pulls_wait_for_a_stage_and_can_be_cancelled_or_run_out_of_time_there(
    pair: Callable[..., Pair],
) -> None:
    clock = ManualClock()
    both = pair((4, 1, 8, 1), {1 + 2 * i: Fault(FaultKind.DROP) for i in range(4)}, clock=clock)
    kv, refs = both.commit(0, seed=1)
    held = [both.pull_of(0, refs, both.table()) for _ in range(4)]
    waiting = [both.pull_of(0, refs, both.table(6)) for _ in range(2)]
    for pull in held:
        both.reader.puller.submit(pull)
        both.injected.get(timeout=PATIENCE_S)
    for pull in waiting:
        both.reader.puller.submit(pull)
    both.reader.puller.cancel(waiting[1].pull_id)
    outcome = both.reader.outcomes.get(timeout=PATIENCE_S)
    assert (outcome.pull_id, outcome.reason, outcome.terminal) == (waiting[1].pull_id, "cancelled", True)
    # Those under way end by their deadline, and their stages come back.
    clock.advance(PATIENCE_S)
    outcomes = [both.reader.outcomes.get(timeout=PATIENCE_S) for _ in range(5)]
    assert {o.pull_id for o in outcomes} == {p.pull_id for p in (*held, waiting[0])}
    assert {o.reason for o in outcomes if o.pull_id != waiting[0].pull_id} <= {"timeout", "peer_lost"}
    last = both.pull_of(0, refs, both.table(12))
    assert both.reader.pull(last).reason == ""
    assert both.is_right(0, kv, both.table(12), 5)
