"""Offers, look-ups, evictions, slow and damaged records in any order: whatever is found is right."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shared.tiering.leases import Pinned
from shared.types.store import BlockKey
from tests.unit.tiering.tiered_setting import Bench, content, cut_key, key


class TieredMachine(RuleBasedStateMachine):
    key: Callable[[int, int], BlockKey] = staticmethod(key)
    max_loads = 7

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(max_loads=self.max_loads, max_stores=5, key=self.key)

    @rule(first=st.integers(0, 4), count=st.integers(1, 3))
    def fill(self, first: int, count: int) -> None:
        numbers = [n for n in range(first, first + count) if self.bench.cpu[0].find(self.key(n, 0)) is None]
        if numbers and all(tier.num_free >= count for tier in self.bench.cpu):
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
        keys = [self.key(n, group) for group in (0, 1) for n in numbers]
        self.bench.tiers.lookup(keys, lambda lease_id, pinned: self.answered(numbers, lease_id, pinned))

    @rule()
    def crowd(self) -> None:
        """All that can go makes room for others."""
        self.bench.crowd()

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


class CollidingMachine(TieredMachine):
    """Different blocks share hashes: in memory, below, on their way, in one prefix and in several."""

    key = staticmethod(cut_key)
    max_loads = 20


TestTieredMachine = TieredMachine.TestCase
TestCollidingMachine = CollidingMachine.TestCase
TestTieredMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestCollidingMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
