"""The CPU tier and its leases: content decides, pins hold, the least recently used goes first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.clock import CountingEntropy, ManualClock
from shared.kv_cache.block_hash import BlockHasher
from shared.tiering.base import Filled
from shared.tiering.cpu import CpuTier
from shared.tiering.leases import PrefixLeases
from shared.tiering.observe import MemoryObserver
from shared.transfer.arena import Arena
from shared.types.identity import IdentityKey
from shared.types.store import BlockKey, tenant_of

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
        tier.commit([Filled(block_id, key(n, group), (n,))])


def held(tier: CpuTier, numbers: range) -> list[int]:
    return [n for n in numbers if tier.lookup([key(n)])]


def test_a_prefix_ends_at_the_first_block_that_is_not_held(arena: Arena) -> None:
    tier = CpuTier(arena, 0, ManualClock())
    fill(tier, [0, 1, 3])
    assert [tier.ref(i).checksums for i in tier.lookup([key(n) for n in range(5)])] == [(0,), (1,)]


def test_an_equal_hash_with_other_content_is_a_miss(arena: Arena) -> None:
    tier = CpuTier(arena, 0, ManualClock())
    fill(tier, [0])
    assert tier.lookup([key(0, tokens=(7, 7))]) == []
    assert tier.lookup([BlockKey(0, b"hash0", b"other", (0, 0))]) == []
    assert tier.lookup([BlockKey(0, b"hash0", b"hash-1", (0, 0), (("picture", 0),))]) == []


class Evictions(MemoryObserver):
    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.idle: list[float] = []

    def evicted(self, reason: str, nbytes: int, age_s: float, idle_s: float) -> None:
        assert nbytes == 64 and age_s >= idle_s
        self.reasons.append(reason)
        self.idle.append(idle_s)


def test_a_prefix_is_eaten_from_its_tail_and_never_where_it_is_pinned(arena: Arena) -> None:
    evictions = Evictions()
    tier = CpuTier(arena, 0, ManualClock(), observer=evictions)
    fill(tier, [0, 1, 2, 3])
    pinned = tier.lookup([key(0)])
    tier.pin(pinned)
    assert len(tier.reserve(2)) == 2
    assert held(tier, range(4)) == [0, 1]
    assert len(tier.reserve(9)) == 1
    assert held(tier, range(4)) == [0]
    assert evictions.reasons == ["capacity"] * 3
    tier.unpin(pinned)
    assert len(tier.reserve(9)) == 1
    tier.check_integrity()


def test_the_least_recently_used_chain_goes_first(arena: Arena) -> None:
    clock, evictions = ManualClock(), Evictions()
    tier = CpuTier(arena, 0, clock, observer=evictions)
    fill(tier, [10])
    fill(tier, [0, 1, 2])
    clock.advance(5)
    tier.use([key(10)])
    clock.advance(1)
    tier.reserve(4)
    assert evictions.idle == [6, 6, 6, 1]


def test_other_content_under_the_same_hash_takes_the_place_of_what_was_there(arena: Arena) -> None:
    tier = CpuTier(arena, 0, ManualClock())
    fill(tier, [0])
    before = tier.lookup([key(0)])
    tier.pin(before)
    (block_id,) = tier.reserve(1)
    tier.commit([Filled(block_id, key(0, tokens=(8, 8)), (1,))])
    assert tier.lookup([key(0)]) == [] and tier.lookup([key(0, tokens=(8, 8))]) == [block_id]
    assert len(tier.reserve(9)) == NUM_BLOCKS - 1  # the reader of the old one still has it
    tier.unpin(before)
    assert tier.reserve(9) == before
    tier.check_integrity()


def test_what_is_held_already_is_given_up(arena: Arena) -> None:
    tier = CpuTier(arena, 0, ManualClock())
    fill(tier, [0, 0])
    ids = tier.reserve(2)
    tier.commit([Filled(ids[0], key(1), (1,)), Filled(ids[1], key(1), (1,))])
    assert (tier.num_held, tier.num_free) == (2, NUM_BLOCKS)
    tier.check_integrity()


class TestTenants:
    """Four blocks, of which a tenant may take half from others."""

    @pytest.fixture
    def tier(self, arena: Arena) -> CpuTier:
        return CpuTier(arena, 0, ManualClock(), tenant_share=0.5)

    def fill(self, tier: CpuTier, numbers: range, tenant: str) -> int:
        ids = tier.reserve(len(numbers), tenant)
        tier.commit([Filled(i, key(n), (n,), tenant) for i, n in zip(ids, numbers, strict=False)])
        tier.check_integrity()
        return len(ids)

    def test_what_is_free_is_anybodys(self, tier: CpuTier) -> None:
        assert self.fill(tier, range(4), "a") == 4 == tier.num_held_by("a")

    def test_others_take_first_from_who_is_beyond_its_share(self, tier: CpuTier) -> None:
        self.fill(tier, range(10, 11), "")  # the oldest
        self.fill(tier, range(3), "a")
        assert self.fill(tier, range(20, 21), "b") == 1
        assert (held(tier, range(30)), tier.num_held_by("a")) == ([0, 1, 10, 20], 2)
        assert self.fill(tier, range(21, 22), "b") == 1
        assert held(tier, range(30)) == [0, 1, 20, 21]

    def test_who_is_beyond_its_share_makes_room_from_its_own(self, tier: CpuTier) -> None:
        self.fill(tier, range(2), "")
        self.fill(tier, range(10, 12), "a")
        assert self.fill(tier, range(20, 21), "a") == 1
        assert held(tier, range(30)) == [0, 1, 10, 20]
        tier.pin(tier.lookup([key(10)]) + tier.lookup([key(20)]))
        assert self.fill(tier, range(22, 23), "a") == 0
        assert self.fill(tier, range(30, 31), "") == 1

    def test_within_its_share_it_takes_by_the_policy(self, tier: CpuTier) -> None:
        self.fill(tier, range(4), "")
        assert self.fill(tier, range(10, 14), "a") == 2
        assert (held(tier, range(30)), tier.num_held_by("a")) == ([0, 1, 10, 11], 2)


def test_no_tenant_ever_finds_anothers_block(arena: Arena) -> None:
    """10,000 look-ups of the same prompts under other salts: the salt is in every hash."""
    hasher = BlockHasher(IdentityKey("m", "r", "t", "f"), 2)
    tier = CpuTier(arena, 0, ManualClock())
    mine = [BlockKey(0, *block) for block in hasher.prompt(range(8), cache_salt="mine")]
    tier.commit([Filled(i, k, (1,), tenant_of("mine")) for i, k in zip(tier.reserve(4), mine, strict=True)])
    assert len(tier.lookup(mine)) == NUM_BLOCKS
    others = (hasher.contents(range(8), cache_salt=f"other {n}") for n in range(10_000))
    assert sum(len(tier.longest(*other)) for other in others) == 0


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo"])
@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=30))
def test_under_every_policy_what_is_held_are_whole_prefixes(
    policy: str, steps: list[tuple[int, int]]
) -> None:
    """Chains of up to four blocks come and are used in any order: no block outlives its parent."""
    with Arena.create("kv", (6,), (64,), "a" * 32) as arena:
        tier = CpuTier(arena, 0, ManualClock(), policy=policy)
        for chain, length in steps:
            keys = [key(10 * chain + n) for n in range(length)]
            there = tier.lookup(keys)
            tier.use(keys[: len(there)])
            tier.pin(there)
            ids = tier.reserve(length - len(there))
            missing = keys[len(there) :][: len(ids)]
            tier.commit([Filled(i, k, (1,)) for i, k in zip(ids, missing, strict=True)])
            tier.unpin(there)
            tier.check_integrity()
            for other in range(6):
                numbers = range(10 * other, 10 * other + 4)
                assert held(tier, numbers) == list(numbers)[: len(held(tier, numbers))]


def test_a_late_discard_is_unusable_until_settled(arena: Arena) -> None:
    tier = CpuTier(arena, 0, ManualClock())
    ids = tier.reserve(NUM_BLOCKS)
    tier.discard(ids[:1], late=True)
    tier.discard(ids[1:], late=False)
    assert sorted(tier.reserve(NUM_BLOCKS)) == sorted(ids[1:])
    tier.settle(ids[:1])
    assert tier.reserve(1) == ids[:1]


def test_each_reuse_has_a_new_generation(arena: Arena) -> None:
    tier = CpuTier(arena, 0, ManualClock())
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
        made = [CpuTier(arena, 0, ManualClock()), CpuTier(arena, 1, ManualClock())]
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
        tier = CpuTier(arena, 0, ManualClock())
        pinned: list[list[int]] = []
        unsettled: list[list[int]] = []
        for action, n in steps:
            if action == "f" and not tier.lookup([key(n)]) and (ids := tier.reserve(1)):
                tier.commit([Filled(ids[0], key(n), (n,))])
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
            tier.check_integrity()
            assert all(tier.ref(i).checksums for ids in pinned for i in ids)
        for ids in pinned:
            tier.unpin(ids)
        for ids in unsettled:
            tier.settle(ids)
        assert tier.num_free == NUM_BLOCKS
