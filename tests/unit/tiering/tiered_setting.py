"""What tests of KV blocks over all tiers share: two groups in memory over two tiers in dicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shared.clock import CountingEntropy, ManualClock
from shared.kernels.checksum import head_checksums
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


def cut_key(n: int, group: int = 0) -> BlockKey:
    """Block ``n`` where there are but three hashes; its parent is whole."""
    return BlockKey(group, b"hash%d" % (n % 3), b"whole%d" % (n - 1), (n, n))


def content(group: int, n: int) -> bytes:
    extent = GROUPS[group].extent_bytes(LAYOUT.block_size)
    return bytes((n + 7 * group + i) % 251 for i in range(extent))


class Bench:
    """Two groups in memory over two tiers; the far one takes no records."""

    def __init__(
        self,
        max_loads: int = 100,
        max_stores: int = 100,
        *,
        key: Callable[[int, int], BlockKey] = key,
        tenant_share: float = 1.0,
    ) -> None:
        self.key = key
        self.clock = ManualClock(100.0)
        self.disk, self.far = DictTier(), DictTier("far")
        self.far.open = False
        self.lower, self.reactor = below(
            self.clock, self.disk, self.far, max_loads=max_loads, max_stores=max_stores
        )
        extents = tuple(g.extent_bytes(LAYOUT.block_size) for g in GROUPS)
        self.arena = Arena.create("kv", (NUM_BLOCKS,) * 2, extents, "a" * 32)
        self.cpu = [CpuTier(self.arena, group, self.clock, tenant_share=tenant_share) for group in (0, 1)]
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
                filled.append(Filled(block_id, self.key(n, group), sums))
            self.tiers.commit(group, filled)

    def put(self, numbers: range, groups: tuple[int, ...] = (0, 1), into: DictTier | None = None) -> None:
        """Straight into a lower tier, the nearer one unless said otherwise."""
        records = (into or self.disk).records
        for group in groups:
            for n in numbers:
                payload = memoryview(bytearray(content(group, n)))
                sums = head_checksums(payload, GROUPS[group].num_kv_heads)
                record = Record(IDENTITY, LAYOUT, KvRecord.of(self.key(n, group)), sums, payload.nbytes)
                records[record.key] = (encode_header(record), bytes(payload))

    def record(self, n: int, group: int = 0) -> bytes:
        return record_key("kv", LAYOUT, group, self.key(n, group).block_hash)

    def ask(self, numbers: Sequence[int], tenant: str = "") -> None:
        keys = [self.key(n, group) for group in (0, 1) for n in numbers]
        self.tiers.lookup(keys, lambda lease_id, pinned: self.answers.append((lease_id, pinned)), tenant)

    def lookup(self, numbers: Sequence[int], tenant: str = "") -> int:
        """Blocks found; their bytes are right, and the lease is given back."""
        self.ask(numbers, tenant)
        self.reactor.run()
        return self.take(numbers)

    def take(self, numbers: Sequence[int]) -> int:
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
