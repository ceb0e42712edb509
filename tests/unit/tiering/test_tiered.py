"""KV blocks over memory and a lower tier: what comes up, what goes down, who waits, and for how long."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shared.clock import CountingEntropy, ManualClock
from shared.kernels.checksum import head_checksums
from shared.telemetry import metrics
from shared.tiering.base import Filled
from shared.tiering.cpu import CpuTier
from shared.tiering.leases import Pinned, PrefixLeases
from shared.tiering.record import KvRecord, Record, encode_header, record_key
from shared.tiering.tiered import KvTiers
from shared.transfer.arena import Arena
from shared.types.identity import IdentityKey, LayoutSpec
from shared.types.kv import KVGroupSpec
from shared.types.store import BlockKey
from tests.fakes.tiers import DictTier, below

IDENTITY = IdentityKey("m", "r", "t", "uint64")
GROUPS = (KVGroupSpec(1, 2, 1, "uint64"), KVGroupSpec(2, 1, 1, "uint64"))
LAYOUT = LayoutSpec(GROUPS, 2)
NUM_BLOCKS = 6


def key(n: int, group: int = 0, tokens: tuple[int, ...] = ()) -> BlockKey:
    return BlockKey(group, b"hash%d" % n, b"hash%d" % (n - 1), tokens or (n, n))


def content(group: int, n: int) -> bytes:
    extent = GROUPS[group].extent_bytes(LAYOUT.block_size)
    return bytes((n + 7 * group + i) % 251 for i in range(extent))


class Bench:
    """Two groups in memory over one tier in a dict."""

    def __init__(self, max_loads: int = 100, max_stores: int = 100) -> None:
        self.clock = ManualClock(100.0)
        self.disk = DictTier()
        self.lower, self.reactor = below(self.clock, self.disk, max_loads=max_loads, max_stores=max_stores)
        extents = tuple(g.extent_bytes(LAYOUT.block_size) for g in GROUPS)
        self.arena = Arena.create("kv", (NUM_BLOCKS,) * 2, extents, "a" * 32)
        self.cpu = [CpuTier(self.arena, group, self.clock) for group in (0, 1)]
        self.leases = PrefixLeases(self.cpu, self.clock, CountingEntropy(), 10)
        self.tiers = KvTiers(IDENTITY, LAYOUT, self.arena, self.cpu, self.lower, self.leases)
        self.lower.chain.on_news = self.tiers.news
        self.answers: list[tuple[str, Pinned]] = []

    def fill(self, numbers: range) -> None:
        """As blocks of an offer arrive."""
        for group, tier in enumerate(self.cpu):
            filled = []
            for n, block_id in zip(numbers, tier.reserve(len(numbers)), strict=True):
                self.arena.block(group, block_id)[:] = content(group, n)
                sums = head_checksums(self.arena.block(group, block_id), GROUPS[group].num_kv_heads)
                filled.append(Filled(block_id, key(n, group), sums))
            self.tiers.commit(group, filled)

    def put(self, numbers: range, groups: tuple[int, ...] = (0, 1)) -> None:
        """Straight into the lower tier."""
        for group in groups:
            for n in numbers:
                payload = memoryview(bytearray(content(group, n)))
                sums = head_checksums(payload, GROUPS[group].num_kv_heads)
                record = Record(IDENTITY, LAYOUT, KvRecord.of(key(n, group)), sums, payload.nbytes)
                self.disk.records[record.key] = (encode_header(record), bytes(payload))

    def record(self, n: int, group: int = 0) -> bytes:
        return record_key("kv", LAYOUT, group, key(n).block_hash)

    def ask(self, numbers: range) -> None:
        keys = [key(n, group) for group in (0, 1) for n in numbers]
        self.tiers.lookup(keys, lambda lease_id, pinned: self.answers.append((lease_id, pinned)))

    def lookup(self, numbers: range) -> int:
        """Blocks found; their bytes are right, and the lease is given back."""
        self.ask(numbers)
        self.reactor.run()
        return self.take(numbers)

    def take(self, numbers: range) -> int:
        (answer,) = self.answers
        self.answers.clear()
        lease_id, pinned = answer
        for group, ids in enumerate(pinned):
            for n, block_id in zip(numbers, ids, strict=False):
                assert bytes(self.arena.block(group, block_id)) == content(group, n)
                assert self.cpu[group].ref(block_id).checksums == head_checksums(
                    self.arena.block(group, block_id), GROUPS[group].num_kv_heads
                )
        assert bool(lease_id) == bool(pinned[0]) and len(pinned[0]) == len(pinned[1])
        self.leases.release([lease_id])
        return len(pinned[0])

    def crowd(self) -> list[int]:
        """Blocks of each group that could be taken; everything that can go is gone afterwards."""
        taken = [tier.reserve(NUM_BLOCKS) for tier in self.cpu]
        for tier, ids in zip(self.cpu, taken, strict=True):
            tier.discard(ids, late=False)
        return [len(ids) for ids in taken]

    def evict_all(self) -> None:
        assert self.crowd() == [NUM_BLOCKS] * 2

    def check(self) -> None:
        for tier in self.cpu:
            tier.check_integrity()
            assert tier.num_free == NUM_BLOCKS


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.reactor.run()
    made.check()
    made.arena.close()


def failures(reason: str) -> float:
    return float(metrics.PROMOTION_FAILURES.labels("disk", reason)._value.get())


def test_what_memory_lacks_is_loaded_and_stays(bench: Bench) -> None:
    bench.put(range(4))
    assert bench.lookup(range(6)) == 4
    assert bench.disk.num_loaded == 8
    assert bench.lookup(range(4)) == 4
    assert bench.disk.num_loaded == 8


def test_memorys_prefix_is_kept_while_the_rest_is_loaded(bench: Bench) -> None:
    bench.fill(range(2))
    bench.put(range(2, 5))
    bench.disk.held = True
    bench.ask(range(5))
    bench.reactor.run()
    assert bench.answers == []
    assert bench.crowd() == [1, 1]  # all others are pinned, or coming
    bench.disk.held = False
    bench.disk.release()
    bench.reactor.run()
    assert bench.take(range(5)) == 5


def test_a_hole_in_memory_is_filled(bench: Bench) -> None:
    bench.fill(range(3, 5))
    bench.put(range(3))
    assert bench.lookup(range(5)) == 5
    assert bench.disk.num_loaded == 6


def test_a_block_counts_only_when_every_group_has_it(bench: Bench) -> None:
    bench.put(range(4), groups=(0,))
    bench.put(range(2), groups=(1,))
    assert bench.lookup(range(4)) == 2
    assert bench.disk.num_loaded == 4


def test_a_plain_miss_asks_for_one_row_and_is_answered_at_once(bench: Bench) -> None:
    bench.ask(range(6))
    assert bench.take(range(6)) == 0
    assert bench.disk.asked == [bench.record(0, 0), bench.record(0, 1)]


def test_concurrent_look_ups_share_one_load(bench: Bench) -> None:
    bench.put(range(3))
    bench.disk.held = True
    bench.ask(range(3))
    bench.ask(range(2))
    bench.disk.release()
    bench.reactor.run()
    assert bench.disk.num_loaded == 6
    assert sorted(len(pinned[0]) for _, pinned in bench.answers) == [2, 3]
    bench.leases.release([lease_id for lease_id, _ in bench.answers])


def test_other_content_under_the_same_hash_is_not_waited_for(bench: Bench) -> None:
    bench.put(range(1))
    bench.disk.held = True
    bench.ask(range(1))
    other = [key(0, group, tokens=(9, 9)) for group in (0, 1)]
    bench.tiers.lookup(other, lambda lease_id, pinned: bench.answers.append((lease_id, pinned)))
    assert bench.take(range(1)) == 0
    bench.disk.release()
    bench.reactor.run()
    assert bench.take(range(1)) == 1


def test_a_record_of_other_content_is_a_miss_and_removed(bench: Bench) -> None:
    bench.put(range(1))
    before = failures("key")
    other = [key(0, group, tokens=(9, 9)) for group in (0, 1)]
    bench.tiers.lookup(other, lambda lease_id, pinned: bench.answers.append((lease_id, pinned)))
    bench.reactor.run()
    assert bench.take(range(1)) == 0
    assert failures("key") == before + 2 and not bench.disk.records


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda header, payload: (header, bytes([payload[0] ^ 1]) + payload[1:]), "payload"),
        (lambda header, payload: (header[:40] + bytes([header[40] ^ 1]) + header[41:], payload), "checksum"),
        (lambda header, payload: (b"", payload), "length"),
        (lambda header, payload: (header, payload[:-1]), "missing"),
    ],
)
def test_what_does_not_verify_is_a_counted_miss(bench: Bench, damage, reason: str) -> None:
    bench.put(range(3))
    name = bench.record(1)
    bench.disk.records[name] = damage(*bench.disk.records[name])
    before = failures(reason)
    assert bench.lookup(range(3)) == 1
    assert failures(reason) == before + 1
    assert (name in bench.disk.records) == (reason == "missing")
    bench.put(range(1, 2))
    assert bench.lookup(range(3)) == 3


def test_another_models_record_is_a_miss(bench: Bench) -> None:
    bench.put(range(1))
    payload = memoryview(bytearray(content(0, 0)))
    foreign = Record(
        IdentityKey("other", "r", "t", "uint64"),
        LAYOUT,
        KvRecord.of(key(0)),
        head_checksums(payload, 2),
        payload.nbytes,
    )
    bench.disk.records[bench.record(0)] = (encode_header(foreign), bytes(payload))
    before = failures("identity")
    assert bench.lookup(range(1)) == 0
    assert failures("identity") == before + 1


def test_too_much_at_a_time_is_a_shorter_hit() -> None:
    bench = Bench(max_loads=5)
    bench.put(range(4))
    assert bench.lookup(range(4)) == 2
    assert bench.lookup(range(4)) == 4
    bench.check()
    bench.arena.close()


def test_memory_that_is_pinned_makes_a_shorter_hit(bench: Bench) -> None:
    bench.fill(range(10, 14))
    bench.ask(range(10, 14))
    bench.reactor.run()
    lease = bench.answers.pop()[0]
    bench.put(range(4))
    assert bench.lookup(range(4)) == 2
    bench.leases.release([lease])


def test_the_deadline_answers_with_what_is_there_and_the_rest_arrives_for_the_next(bench: Bench) -> None:
    bench.fill(range(1))
    bench.put(range(1, 3))
    bench.disk.held = True
    bench.ask(range(3))
    bench.reactor.run()
    bench.clock.advance(1.0)
    bench.reactor.run()
    assert bench.take(range(3)) == 1
    bench.disk.release()
    bench.reactor.run()
    assert bench.answers == []
    assert bench.lookup(range(3)) == 3


def test_not_yet_is_asked_again_when_the_tier_has_news(bench: Bench) -> None:
    bench.put(range(1))
    bench.disk.unsure = {bench.record(1, 0), bench.record(1, 1)}
    bench.ask(range(3))
    bench.reactor.run()
    assert bench.answers == []
    bench.put(range(1, 2))
    bench.disk.unsure = set()
    bench.disk.release()
    bench.reactor.run()
    assert bench.take(range(3)) == 2


def test_the_second_use_is_written_and_the_first_is_not(bench: Bench) -> None:
    bench.fill(range(3))
    bench.reactor.run()
    assert bench.disk.num_stored == 0
    assert bench.lookup(range(2)) == 2
    assert set(bench.disk.records) == {bench.record(n, group) for n in range(2) for group in (0, 1)}
    bench.evict_all()
    assert bench.lookup(range(3)) == 2


def test_what_was_written_is_not_written_again_before_a_while(bench: Bench) -> None:
    bench.fill(range(1))
    for _ in range(3):
        bench.lookup(range(1))
    assert bench.disk.num_stored == 2
    bench.clock.advance(60.0)
    bench.lookup(range(1))
    assert bench.disk.num_stored == 4


def test_what_came_from_below_is_not_written_back(bench: Bench) -> None:
    bench.put(range(2))
    for _ in range(3):
        assert bench.lookup(range(2)) == 2
    assert bench.disk.num_stored == 0


def test_a_block_that_is_being_written_stays_where_it_is(bench: Bench) -> None:
    bench.fill(range(1))
    bench.disk.held = True
    bench.lookup(range(1))
    assert bench.crowd() == [NUM_BLOCKS - 1] * 2
    bench.disk.release()
    bench.reactor.run()
    bench.evict_all()


def test_writes_that_are_off_or_find_no_room_change_nothing() -> None:
    bench = Bench(max_stores=2)
    bench.disk.open = False
    bench.fill(range(2))
    assert bench.lookup(range(2)) == 2 and bench.disk.num_stored == 0
    bench.disk.open = True
    assert bench.lookup(range(2)) == 2
    assert set(bench.disk.records) == {bench.record(0, 0), bench.record(0, 1)}
    bench.check()
    bench.arena.close()


class TieredMachine(RuleBasedStateMachine):
    """Offers, look-ups, evictions, slow and damaged records in any order: whatever is found is right."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(max_loads=7, max_stores=5)

    @rule(first=st.integers(0, 4), count=st.integers(1, 3))
    def fill(self, first: int, count: int) -> None:
        numbers = [n for n in range(first, first + count) if self.bench.cpu[0].find(key(n)) is None]
        if all(tier.num_free >= count for tier in self.bench.cpu) and numbers:
            self.bench.fill(range(numbers[0], numbers[0] + 1))

    @rule(first=st.integers(0, 4), count=st.integers(1, 4))
    def put(self, first: int, count: int) -> None:
        self.bench.put(range(first, first + count))

    @rule(index=st.integers(0, 99), at=st.integers(0, 9999))
    def damage(self, index: int, at: int) -> None:
        records = self.bench.disk.records
        if records:
            name = sorted(records)[index % len(records)]
            header, payload = records[name]
            at %= len(payload)
            records[name] = header, payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :]

    @rule(held=st.booleans())
    def hold(self, held: bool) -> None:
        self.bench.disk.held = held
        if not held:
            self.bench.disk.release()

    @rule(first=st.integers(0, 4), count=st.integers(1, 4))
    def ask(self, first: int, count: int) -> None:
        numbers = range(first, first + count)
        keys = [key(n, group) for group in (0, 1) for n in numbers]
        self.bench.tiers.lookup(keys, lambda lease_id, pinned: self.answered(numbers, lease_id, pinned))

    def answered(self, numbers: range, lease_id: str, pinned: Pinned) -> None:
        self.bench.answers.append((lease_id, pinned))
        for group, ids in enumerate(pinned):
            for n, block_id in zip(numbers, ids, strict=False):
                assert bytes(self.bench.arena.block(group, block_id)) == content(group, n)

    @rule()
    def run(self) -> None:
        self.bench.reactor.run()

    @rule()
    def let_go(self) -> None:
        self.bench.leases.release([lease_id for lease_id, _ in self.bench.answers])

    @rule()
    def pass_time(self) -> None:
        self.bench.clock.advance(1.0)
        self.bench.reactor.run()

    @invariant()
    def books_are_right(self) -> None:
        for tier in self.bench.cpu:
            tier.check_integrity()

    def teardown(self) -> None:
        self.hold(False)
        self.pass_time()
        self.let_go()
        self.bench.check()
        assert self.bench.lower.chain.num_jobs == 0
        self.bench.arena.close()


TestTieredMachine = TieredMachine.TestCase
TestTieredMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
