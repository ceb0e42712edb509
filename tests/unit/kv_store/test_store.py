"""The store with a scripted puller: what becomes findable, and when room comes back."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.clock import CountingEntropy, ManualClock
from shared.failpoints import Failpoints
from shared.tiering.kv_store import MISS, KvStore, Limits
from shared.tiering.pulls import Pulls
from shared.transfer.arena import Arena
from shared.transfer.handoff import Pull, PullOutcome
from shared.types.identity import IdentityKey, LayoutSpec
from shared.types.kv import KVGroupSpec
from shared.types.store import BlockKey, OfferedBlock, StoreHit
from shared.types.transfer import AgentInfo, BlockRef
from tests.fakes.tiers import below

GROUPS = (KVGroupSpec(1, 2, 1, "uint64"), KVGroupSpec(2, 1, 1, "uint64"))
LAYOUT = LayoutSpec(GROUPS, 2)
PRODUCER = AgentInfo("worker", "b" * 32, 1, (), (), LAYOUT)
NUM_BLOCKS = 6


class Desk:
    """A store whose pulls end when the test says so."""

    def __init__(self, arms: str = "") -> None:
        self.clock = ManualClock()
        extents = tuple(g.extent_bytes(LAYOUT.block_size) for g in GROUPS)
        self.arena = Arena.create("kv", (NUM_BLOCKS,) * 2, extents, "a" * 32, 3)
        self.own = AgentInfo("store", "a" * 32, 3, (), (self.arena.info,), LAYOUT)
        self.outcomes: list[PullOutcome] = []
        self._pulls = Pulls("kv", self.outcomes.append)
        self._pulls.bind(self)
        self.store = KvStore(
            IdentityKey("m", "r", "t", "uint64"),
            LAYOUT,
            self.arena,
            lambda: self.own,
            self._pulls,
            below(self.clock)[0],
            self.clock,
            CountingEntropy(),
            Failpoints.parse(arms),
            Limits("lru", 1.0, lease_s=10),
        )
        self.pulls: list[Pull] = []
        self.answers: list[int] = []

    def submit(self, pull: Pull) -> None:
        self.pulls.append(pull)

    def offer(self, blocks: list[OfferedBlock], producer: AgentInfo = PRODUCER) -> None:
        self.store.offer(producer, blocks, self.answers.append)

    def end(self, pull: Pull, reason: str = "", *, ok: bool = True, terminal: bool = True) -> None:
        self.pulls.remove(pull)
        good = (ok and not reason,) * len(pull.blocks)
        self._pulls.on_outcome(PullOutcome(pull.pull_id, good, reason, terminal, 0, 0.0, "shm"))

    def settle(self, pull_id: str) -> None:
        self._pulls.on_settled(pull_id)

    def end_all(self) -> None:
        for pull in tuple(self.pulls):
            self.end(pull)

    def lookup(self, numbers: range, layout: LayoutSpec = LAYOUT) -> StoreHit:
        hits: list[StoreHit] = []
        self.store.lookup(layout, [key(n, group) for group in (0, 1) for n in numbers], hits.append)
        (hit,) = hits
        return hit

    def assert_at_rest(self) -> None:
        self.store.check_integrity()
        assert (self.store.num_leases, self.store.num_quarantined) == (0, 0)
        assert self.store.num_free == self.store.num_blocks


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.arena.close()


def key(n: int, group: int) -> BlockKey:
    return BlockKey(group, b"hash%d" % n, b"hash%d" % (n - 1), (n, n))


def offered(numbers: range) -> list[OfferedBlock]:
    return [
        OfferedBlock(key(n, group), BlockRef(n, 1, tuple(range(GROUPS[group].num_kv_heads))))
        for group in (0, 1)
        for n in numbers
    ]


def test_a_block_is_found_only_after_its_pull_was_good_in_every_group(desk: Desk) -> None:
    desk.offer(offered(range(3)))
    first, second = desk.pulls
    assert (first.group, second.group, len(first.blocks), first.checksum_heads) == (0, 1, 3, 2)
    desk.end(first)
    assert desk.lookup(range(3)) == MISS
    assert desk.answers == []
    desk.end(second)
    assert desk.answers == [6]
    hit = desk.lookup(range(4))
    assert (hit.num_blocks, hit.lease_s) == (3, 10)
    assert [run.group for run in hit.runs] == [0, 1]
    assert {run.handoff_id for run in hit.runs} == {hit.lease_id}
    assert all(run.producer == desk.own for run in hit.runs)
    assert hit.runs[0].blocks[2].checksums == (0, 1)
    desk.store.release([hit.lease_id])
    desk.assert_at_rest()


@pytest.mark.parametrize("reason", ["peer_lost", "stale", "corrupt", "failed"])
def test_a_pull_that_failed_leaves_nothing(desk: Desk, reason: str) -> None:
    desk.offer(offered(range(2)))
    for pull in tuple(desk.pulls):
        desk.end(pull, reason)
    assert desk.answers == [0]
    assert desk.lookup(range(2)) == MISS
    desk.assert_at_rest()


def test_blocks_of_a_dead_worker_are_quarantined_until_settled(desk: Desk) -> None:
    desk.offer(offered(range(2)))
    first, second = desk.pulls
    desk.end(first, "timeout", terminal=False)
    desk.end(second, "peer_lost")
    assert desk.store.num_quarantined == 2
    desk.offer(offered(range(NUM_BLOCKS)))
    assert [len(pull.blocks) for pull in desk.pulls] == [NUM_BLOCKS - 2, NUM_BLOCKS]
    desk.end_all()
    desk.settle(first.pull_id)
    desk.assert_at_rest()


def test_what_is_held_or_coming_is_not_pulled_twice(desk: Desk) -> None:
    desk.offer(offered(range(2)))
    desk.offer(offered(range(3)))
    assert [len(pull.blocks) for pull in desk.pulls] == [2, 2, 1, 1]
    desk.end_all()
    desk.offer(offered(range(3)))
    assert desk.pulls == []
    assert desk.answers == [4, 2, 6]


def test_an_offer_of_another_layout_or_shape_is_refused(desk: Desk) -> None:
    desk.offer(offered(range(1)), msgspec.structs.replace(PRODUCER, layout=None))
    desk.offer(offered(range(1)), msgspec.structs.replace(PRODUCER, layout=LayoutSpec(GROUPS, 4)))
    good = offered(range(1))[0]
    desk.offer([OfferedBlock(good.key, BlockRef(0, 1, (1,)))])
    desk.offer([OfferedBlock(msgspec.structs.replace(good.key, token_ids=(1,)), good.ref)])
    desk.offer([OfferedBlock(msgspec.structs.replace(good.key, group=2), good.ref)])
    assert (desk.answers, desk.pulls) == ([0] * 5, [])
    desk.offer(offered(range(1)))
    desk.end_all()
    assert desk.lookup(range(1), LayoutSpec(GROUPS, 4)) == MISS


def test_a_lease_keeps_blocks_until_it_is_released_or_over(desk: Desk) -> None:
    desk.offer(offered(range(NUM_BLOCKS)))
    desk.end_all()
    hit = desk.lookup(range(2))
    desk.offer(offered(range(10, 10 + NUM_BLOCKS)))
    assert [len(pull.blocks) for pull in desk.pulls] == [NUM_BLOCKS - 2] * 2
    desk.end_all()
    again = desk.lookup(range(2))
    assert again.num_blocks == 2
    desk.store.release([hit.lease_id])
    assert desk.store.num_free == desk.store.num_blocks - 4
    desk.clock.advance(10)
    desk.store.expire()
    desk.assert_at_rest()


def test_an_armed_failpoint_keeps_the_block_out(desk: Desk) -> None:
    armed = Desk("store.before_publish=raise:2")
    armed.offer(offered(range(2)))
    armed.end_all()
    assert armed.answers == [3]
    assert armed.lookup(range(2)).num_blocks == 1
    armed.arena.close()


class StoreMachine(RuleBasedStateMachine):
    """Every interleaving of offers, ends of pulls, deaths, look-ups and time, against a set of what
    was published."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk()
        self.unsettled: list[str] = []
        self.leases: list[str] = []
        self.num_offers = 0
        self.published: set[tuple[int, int]] = set()

    @rule(first=st.integers(0, 8), count=st.integers(1, 4))
    def offer(self, first: int, count: int) -> None:
        self.num_offers += 1
        self.desk.offer(offered(range(first, first + count)))

    @precondition(lambda self: self.desk.pulls)
    @rule(index=st.integers(0, 99), how=st.sampled_from(["", "", "corrupt", "peer_lost", "timeout"]))
    def end(self, index: int, how: str) -> None:
        pull = self.desk.pulls[index % len(self.desk.pulls)]
        self.desk.end(pull, how, terminal=how != "timeout")
        if how == "timeout":
            self.unsettled.append(pull.pull_id)
        if not how:
            self.published.update((pull.group, block.remote.block_id) for block in pull.blocks)

    @precondition(lambda self: self.unsettled)
    @rule()
    def settle(self) -> None:
        self.desk.settle(self.unsettled.pop())

    @rule(first=st.integers(0, 8))
    def lookup(self, first: int) -> None:
        hit = self.desk.lookup(range(first, first + 4))
        assert (hit == MISS) == (not hit.lease_id) == (hit.num_blocks == 0)
        if hit.lease_id:
            self.leases.append(hit.lease_id)
        found = {(g, n) for g in (0, 1) for n in range(first, first + hit.num_blocks)}
        assert found <= self.published

    @precondition(lambda self: self.leases)
    @rule()
    def release(self) -> None:
        self.desk.store.release([self.leases.pop()])

    @rule(seconds=st.sampled_from([1, 6]))
    def pass_time(self, seconds: int) -> None:
        self.desk.clock.advance(seconds)
        self.desk.store.expire()

    @invariant()
    def books_are_right(self) -> None:
        self.desk.store.check_integrity()

    def teardown(self) -> None:
        self.desk.end_all()
        for pull_id in self.unsettled:
            self.desk.settle(pull_id)
        self.desk.clock.advance(10)
        self.desk.store.expire()
        self.desk.assert_at_rest()
        assert len(self.desk.answers) == self.num_offers
        self.desk.arena.close()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
