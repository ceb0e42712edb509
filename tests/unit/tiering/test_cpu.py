"""The CPU tier and its leases: content decides, pins hold, the least recently used goes first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.clock import CountingEntropy, ManualClock
from shared.tiering.cpu import CpuTier
from shared.tiering.leases import PrefixLeases
from shared.transfer.arena import Arena
from shared.types.store import BlockKey

NUM_BLOCKS = 4


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create("kv", (NUM_BLOCKS, NUM_BLOCKS), (64, 32), "a" * 32) as made:
        yield made


def key(n: int, group: int = 0, tokens: tuple[int, ...] = ()) -> BlockKey:
    """The ``n``-th block of one chain; other ``tokens`` make a different block with the same hash."""
    return BlockKey(group, b"hash%d" % n, b"hash%d" % (n - 1), tokens or (n, n))


def fill(tier: CpuTier, numbers: list[int], group: int = 0) -> None:
    for n, block_id in zip(numbers, tier.reserve(len(numbers)), strict=True):
        tier.commit(block_id, key(n, group), (n,))


def held(tier: CpuTier, numbers: range) -> list[int]:
    return [n for n in numbers if tier.lookup([key(n)])]


def test_a_prefix_ends_at_the_first_block_that_is_not_held(arena: Arena) -> None:
    tier = CpuTier(arena, 0)
    fill(tier, [0, 1, 3])
    assert [tier.ref(i).checksums for i in tier.lookup([key(n) for n in range(5)])] == [(0,), (1,)]


def test_an_equal_hash_with_other_content_is_a_miss(arena: Arena) -> None:
    tier = CpuTier(arena, 0)
    fill(tier, [0])
    assert tier.lookup([key(0, tokens=(7, 7))]) == []
    assert tier.lookup([BlockKey(0, b"hash0", b"other", (0, 0))]) == []
    assert tier.lookup([BlockKey(0, b"hash0", b"hash-1", (0, 0), (("picture", 0),))]) == []


def test_room_is_made_from_the_least_recently_used_and_never_from_pinned_blocks(arena: Arena) -> None:
    evicted: list[int] = []
    tier = CpuTier(arena, 0, lambda: evicted.append(1))
    fill(tier, [0, 1, 2, 3])
    pinned = tier.lookup([key(0)])
    tier.pin(pinned)
    assert len(tier.reserve(2)) == 2
    assert held(tier, range(4)) == [0, 3]
    assert len(tier.reserve(9)) == 1
    assert held(tier, range(4)) == [0]
    assert len(evicted) == 3
    tier.unpin(pinned)
    assert len(tier.reserve(9)) == 1
    tier.pool.check_integrity()


def test_a_late_discard_is_unusable_until_settled(arena: Arena) -> None:
    tier = CpuTier(arena, 0)
    ids = tier.reserve(NUM_BLOCKS)
    tier.discard(ids[:1], late=True)
    tier.discard(ids[1:], late=False)
    assert sorted(tier.reserve(NUM_BLOCKS)) == sorted(ids[1:])
    tier.settle(ids[:1])
    assert tier.reserve(1) == ids[:1]


def test_each_reuse_has_a_new_generation(arena: Arena) -> None:
    tier = CpuTier(arena, 0)
    fill(tier, [0])
    (block_id,) = tier.lookup([key(0)])
    before = tier.ref(block_id)
    tier.reserve(NUM_BLOCKS)
    assert tier.ref(block_id).generation > before.generation
    assert int(arena.generations(0)[block_id]) == tier.ref(block_id).generation


class TestLeases:
    """Leases over two groups, of which the shorter prefix counts."""

    @pytest.fixture
    def tiers(self, arena: Arena) -> list[CpuTier]:
        made = [CpuTier(arena, 0), CpuTier(arena, 1)]
        fill(made[0], [0, 1, 2], 0)
        fill(made[1], [0, 1], 1)
        return made

    def keys(self) -> list[BlockKey]:
        return [key(n, group) for group in (0, 1) for n in range(4)]

    def test_the_prefix_is_what_every_group_holds(self, tiers: list[CpuTier]) -> None:
        leases = PrefixLeases(tiers, ManualClock(), CountingEntropy(), 10)
        lease_id, pinned = leases.grant(self.keys())
        assert lease_id and [len(ids) for ids in pinned] == [2, 2]
        assert [len(tier.reserve(9)) for tier in tiers] == [2, 2]
        leases.release([lease_id, lease_id, "unknown"])
        assert [len(tier.reserve(9)) for tier in tiers] == [2, 2]

    def test_nothing_found_grants_nothing(self, tiers: list[CpuTier]) -> None:
        leases = PrefixLeases(tiers, ManualClock(), CountingEntropy(), 10)
        assert leases.grant(self.keys()[4:])[0] == ""
        assert leases.grant([])[0] == ""
        assert len(leases) == 0

    def test_an_expired_lease_pins_nothing(self, tiers: list[CpuTier]) -> None:
        clock = ManualClock()
        leases = PrefixLeases(tiers, clock, CountingEntropy(), 10)
        lease_id, _ = leases.grant(self.keys())
        clock.advance(9.9)
        assert leases.expire() == 0
        clock.advance(0.2)
        assert leases.expire() == 1
        assert [len(tier.reserve(9)) for tier in tiers] == [4, 4]
        leases.release([lease_id])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("flpue"), st.integers(0, 9)), max_size=40))
def test_no_order_of_use_loses_a_block(steps: list[tuple[str, int]]) -> None:
    """Fill, look up and pin, unpin, discard late, settle: every block ends in exactly one state."""
    with Arena.create("kv", (NUM_BLOCKS,), (64,), "a" * 32) as arena:
        tier = CpuTier(arena, 0)
        pinned: list[list[int]] = []
        unsettled: list[list[int]] = []
        for action, n in steps:
            if action == "f" and not tier.lookup([key(n)]) and (ids := tier.reserve(1)):
                tier.commit(ids[0], key(n), (n,))
            elif action == "l" and (ids := tier.lookup([key(n)])):
                tier.pin(ids)
                pinned.append(ids)
            elif action == "p" and pinned:
                tier.unpin(pinned.pop(n % len(pinned)))
            elif action == "u" and (ids := tier.reserve(1)):
                tier.discard(ids, late=True)
                unsettled.append(ids)
            elif action == "e" and unsettled:
                tier.settle(unsettled.pop())
            tier.pool.check_integrity()
            assert all(tier.ref(i).checksums for ids in pinned for i in ids)
        for ids in pinned:
            tier.unpin(ids)
        for ids in unsettled:
            tier.settle(ids)
        assert tier.pool.num_free == NUM_BLOCKS
