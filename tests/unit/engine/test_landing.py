"""Destination blocks belong to their transfer until it is settled, whatever happens to the request."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shared.engine.desk import PullDesk
from shared.engine.inbox import Inbox
from shared.engine.landing import Landing
from shared.kv_cache.block_hash import BlockHasher
from shared.kv_cache.manager import KVCacheManager
from shared.transfer.handoff import Pull, PullOutcome
from shared.types.identity import IdentityKey, LayoutSpec
from shared.types.kv import KVCacheSpec, KVGroupSpec
from shared.types.transfer import AgentInfo, BlockRef

PRODUCER = AgentInfo("prefill-0", "i", 1, (), ())
REFS = tuple(BlockRef(100 + i, 1, (i, i)) for i in range(3))


class RecordingPuller:
    """Remembers what it was asked; the test answers."""

    def __init__(self) -> None:
        self.pulls: list[Pull] = []
        self.cancelled: list[str] = []

    def submit(self, pull: Pull) -> None:
        self.pulls.append(pull)

    def cancel(self, pull_id: str) -> None:
        self.cancelled.append(pull_id)

    def notify(self, producer: AgentInfo, payload: bytes) -> None:
        raise AssertionError("not expected here")


class Bench:
    """Two groups of different geometry over one desk."""

    def __init__(self, num_blocks: int = 8) -> None:
        spec = KVCacheSpec(4, (KVGroupSpec(1, 2, 1, "uint64"), KVGroupSpec(3, 1, 2, "uint64")))
        hasher = BlockHasher(IdentityKey("m", "r", "t", "uint64"), 4)
        self.kv = KVCacheManager(spec, [num_blocks, num_blocks], hasher)
        self.inbox = Inbox()
        self.desk = PullDesk(self.inbox)
        self.puller = RecordingPuller()
        self.desk.bind(self.puller)
        self.outcomes: list[PullOutcome] = []
        self.kv.open("a", list(range(12)), (), "", "", 12)
        self.kv.reserve("a", 12, writable_from=0)
        self.landing = Landing("a", 0, self.kv, self.desk, 1.0, self.outcomes.append)

    def answer(self, index: int, ok: tuple[bool, ...], terminal: bool = True) -> Callable[[], None]:
        pull = self.puller.pulls[index]
        reason = "" if all(ok) else "timeout"
        self.desk.deliver(PullOutcome(pull.pull_id, ok, reason, terminal, 10, 0.1, "shm"))
        self.inbox.run()

        def settle() -> None:
            self.desk.settle(pull.pull_id)
            self.inbox.run()

        return settle

    def quarantined(self) -> tuple[int, int]:
        return self.kv.num_quarantined(0), self.kv.num_quarantined(1)


def test_a_block_counts_only_when_every_group_has_it() -> None:
    bench = Bench()
    bench.landing.pull(PRODUCER, 0, 0, REFS)
    bench.answer(0, (True, True, True))
    assert bench.landing.num_valid(3) == 0
    bench.landing.pull(PRODUCER, 1, 0, REFS[:2])
    bench.answer(1, (True, True))
    assert bench.landing.num_valid(3) == 2
    sums = bench.landing.checksums(2)
    assert len(sums) == 4 and set(sums.values()) == {(0, 0), (1, 1)}


def test_blocks_of_a_timed_out_pull_are_replaced_and_kept_from_everybody_until_settled() -> None:
    bench = Bench()
    before = bench.kv.table("a")[0]
    bench.landing.pull(PRODUCER, 0, 0, REFS)
    settle = bench.answer(0, (True, False, False), terminal=False)
    after = bench.kv.table("a")[0]
    assert after[0] == before[0] and set(after[1:]).isdisjoint(before[1:])
    assert bench.quarantined() == (2, 0)
    bench.kv.check_integrity()
    settle()
    assert bench.quarantined() == (0, 0)
    assert bench.landing.num_valid(3) == 0
    bench.landing.close()
    assert bench.kv.num_used() == 0


def test_closing_with_a_pull_in_flight_quarantines_its_blocks_until_it_is_over() -> None:
    bench = Bench()
    bench.landing.pull(PRODUCER, 1, 1, REFS[:2])
    bench.landing.close()
    assert bench.puller.cancelled == [bench.puller.pulls[0].pull_id]
    assert bench.quarantined() == (0, 2)
    assert bench.kv.num_used() == 0
    settle = bench.answer(0, (False, False), terminal=False)
    assert bench.quarantined() == (0, 2)
    settle()
    assert bench.quarantined() == (0, 0)
    bench.kv.check_integrity()


def test_without_fresh_blocks_the_whole_table_is_given_up() -> None:
    bench = Bench(num_blocks=3)
    bench.landing.pull(PRODUCER, 0, 0, REFS)
    settle = bench.answer(0, (False, False, False), terminal=False)
    assert bench.landing.lost
    assert bench.quarantined() == (3, 0)
    assert bench.kv.num_used() == 0
    settle()
    assert bench.kv.num_free() == 6


def test_held_blocks_and_blocks_beyond_the_table_are_not_pulled() -> None:
    bench = Bench()
    landing = Landing("a", 2, bench.kv, bench.desk, 1.0, bench.outcomes.append)
    landing.pull(PRODUCER, 0, 0, (*REFS, *REFS))
    assert [b.local_block for b in bench.puller.pulls[0].blocks] == [bench.kv.table("a")[0][2]]


def test_what_is_attached_after_the_table_was_given_up_is_ignored() -> None:
    bench = Bench(num_blocks=3)
    bench.landing.pull(PRODUCER, 0, 0, REFS)
    bench.answer(0, (False, False, False), terminal=False)
    assert bench.landing.lost
    bench.landing.pull(PRODUCER, 1, 0, REFS)
    assert len(bench.puller.pulls) == 1


# --- blocks of another size -----------------------------------------------------------------


def sized(bench: Bench, block_size: int) -> AgentInfo:
    """A producer whose blocks have so many tokens."""
    return AgentInfo("prefill-0", "i", 1, (), (), LayoutSpec(bench.kv.spec.groups, block_size))


def refs(count: int) -> tuple[BlockRef, ...]:
    return tuple(BlockRef(100 + i, 1, (i, i)) for i in range(count))


def landing(bench: Bench, num_tokens: int | None, num_held: int = 0) -> Landing:
    return Landing("a", num_held, bench.kv, bench.desk, 1.0, bench.outcomes.append, num_tokens)


def made(bench: Bench, number: int, *sums: tuple[int, ...], reason: str = "") -> None:
    """The answer to pull ``number``: checksums of the blocks of ours that are whole."""
    pull = bench.puller.pulls[number]
    ok = tuple([not reason] * len(pull.blocks))
    bench.desk.deliver(PullOutcome(pull.pull_id, ok, reason, True, 10, 0.1, "shm", sums))
    bench.inbox.run()


def test_smaller_blocks_are_pulled_once_they_make_a_whole_one_of_ours() -> None:
    bench = Bench()
    into = landing(bench, num_tokens=11)
    table = bench.kv.table("a")[0]
    producer = sized(bench, 2)
    into.pull(producer, 0, 0, refs(6)[:3])
    into.pull(producer, 0, 3, refs(6)[3:5])
    into.pull(producer, 0, 5, refs(6)[5:])
    taken = [[b.remote.block_id - 100 for b in pull.blocks] for pull in bench.puller.pulls]
    assert taken == [[0, 1], [2, 3], [4, 5]]
    assert [pull.reslice.into for pull in bench.puller.pulls if pull.reslice] == [(b,) for b in table]
    for number in range(3):
        made(bench, number, (number, 7))
    bench.landing.pull(PRODUCER, 1, 0, REFS)
    assert into.num_valid(3) == 0, "the other group has nothing"
    into.pull(producer, 1, 0, refs(6))
    made(bench, 4, (9,), (), (9,))
    assert into.num_valid(3) == 1
    assert into.checksums(1) == {(0, table[0]): (0, 7), (1, bench.kv.table("a")[1][0]): (9,)}


def test_a_tail_needs_only_the_blocks_that_hold_valid_tokens() -> None:
    bench = Bench()
    into = landing(bench, num_tokens=9)
    into.pull(sized(bench, 2), 0, 0, refs(5))
    (pull,) = bench.puller.pulls
    assert [b.remote.block_id - 100 for b in pull.blocks] == [0, 1, 2, 3, 4]
    assert pull.reslice is not None and pull.reslice.into == bench.kv.table("a")[0]


def test_larger_blocks_fill_several_of_ours_and_leave_held_ones_alone() -> None:
    bench = Bench()
    into = landing(bench, num_tokens=12, num_held=1)
    table = bench.kv.table("a")[0]
    into.pull(sized(bench, 8), 0, 0, refs(2))
    (pull,) = bench.puller.pulls
    assert pull.reslice is not None and pull.reslice.into == (-1, *table[1:])
    assert [b.local_block for b in pull.blocks] == [0, 1]
    made(bench, 0, (), (1, 1), (2, 2))
    into.pull(sized(bench, 8), 1, 0, refs(2))
    made(bench, 1, (), (3,), (4,))
    assert into.num_valid(3) == 3
    assert (0, table[1]) in into.checksums(3) and (0, table[0]) not in into.checksums(3)


def test_what_was_asked_for_is_not_asked_for_again() -> None:
    """Else two pulls could write one block, and each would give it back."""
    for producer_size in (2, 4, 8):
        bench = Bench()
        into = landing(bench, num_tokens=12)
        for _ in range(3):
            into.pull(sized(bench, producer_size), 0, 0, refs(6))
        assert len(bench.puller.pulls) == 1
        into.close()
        bench.answer(0, (False,) * len(bench.puller.pulls[0].blocks), terminal=False)()
        assert bench.quarantined() == (0, 0)
        bench.kv.check_integrity()


def test_a_resliced_pull_that_failed_leaves_its_blocks_to_be_computed() -> None:
    bench = Bench()
    into = landing(bench, num_tokens=12)
    before = bench.kv.table("a")[0]
    into.pull(sized(bench, 8), 0, 0, refs(2))
    settle = bench.answer(0, (False, False), terminal=False)
    assert into.num_valid(3) == 0
    assert set(bench.kv.table("a")[0]).isdisjoint(before) and bench.quarantined() == (3, 0)
    settle()
    assert bench.quarantined() == (0, 0)


@pytest.mark.parametrize(
    ("block_size", "group", "first"),
    [
        (3, 0, 0),
        (0, 0, 0),
        (-4, 0, 0),
        (6, 0, 0),
        (8, 2, 0),
        (4, 2, 0),
        (4, 64, 0),
        (8, 0, 1 << 19),
        (2, 0, 99),
    ],
)
def test_numbers_that_make_no_sense_are_no_pull(block_size: int, group: int, first: int) -> None:
    bench = Bench()
    landing(bench, num_tokens=12).pull(sized(bench, block_size), group, first, refs(4))
    assert not bench.puller.pulls


def test_without_the_number_of_tokens_only_blocks_of_our_size_are_taken() -> None:
    bench = Bench()
    into = landing(bench, num_tokens=None)
    into.pull(sized(bench, 8), 0, 0, refs(2))
    assert not bench.puller.pulls
    into.pull(sized(bench, 4), 0, 0, refs(2))
    assert len(bench.puller.pulls) == 1
