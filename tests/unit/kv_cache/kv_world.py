"""A plain model of a worker's KV memory, to run a manager against.

A memory cell is a number that stands for one position with everything before it, exactly: equal prefixes
have equal cells, different ones never. So a wrong hit, a lost copy, two writers of one block, a landing in
somebody's block or a stale checksum all show as a cell that is not what it should be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shared.kv_cache.manager import KVCacheManager
from shared.types.request import MediaItem
from shared.types.transfer import BlockRef

BLOCK_SIZE = 2
GARBAGE = -1


@dataclass
class Plan:
    """A step that ran on the device, whose results the manager does not know yet."""

    num_computed: int
    checksums: dict[tuple[int, int], tuple[int, ...]]
    sampled: list[int]


@dataclass
class Model:
    """What is true of one open sequence."""

    salt: str
    media: tuple[MediaItem, ...]
    tokens: list[int]  # as the device knows them; the manager hears of sampled ones later
    computed: int = 0
    plans: list[Plan] = field(default_factory=list)
    flying: set[tuple[int, int]] = field(default_factory=set)  # (group, index) of blocks being pulled
    pulled: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """flying: its prompt is on the way; stepping: results are outstanding; idle otherwise."""
        return "flying" if self.flying else "stepping" if self.plans else "idle"


class World:
    """Memory of every group, and the cells that prefixes have."""

    def __init__(self, num_blocks: Sequence[int]) -> None:
        self.memory = [[[GARBAGE] * BLOCK_SIZE for _ in range(n)] for n in num_blocks]
        self._cells: dict[tuple[object, ...], int] = {}

    def intern(self, *parts: object) -> int:
        return self._cells.setdefault(parts, len(self._cells))

    def cells(self, seq: Model, stop: int) -> list[int]:
        """What positions 0 .. stop - 1 must hold."""
        cell, found = self.intern("root", seq.salt), []
        for position, token in enumerate(seq.tokens[:stop]):
            rows = [
                (m.mm_hash, position - m.offset)
                for m in seq.media
                if m.offset <= position < m.offset + m.num_tokens
            ]
            cell = self.intern(cell, token, *rows)
            found.append(cell)
        return found

    def write(self, manager: KVCacheManager, key: str, seq: Model, positions: Iterable[int]) -> None:
        """Compute: each position's cell depends on the cell before it, as it is read from memory."""
        tables = manager.table(key)
        wanted = self.cells(seq, len(seq.tokens))
        for group, table in enumerate(tables):
            for position in positions:
                if position:
                    before = self.memory[group][table[(position - 1) // BLOCK_SIZE]][
                        (position - 1) % BLOCK_SIZE
                    ]
                    assert before == wanted[position - 1], "attention reads another sequence's KV"
                self.memory[group][table[position // BLOCK_SIZE]][position % BLOCK_SIZE] = wanted[position]

    def land(self, group: int, block_id: int, cells: Sequence[int] = (GARBAGE,) * BLOCK_SIZE) -> None:
        """A transfer writes a whole block."""
        self.memory[group][block_id][:] = [*cells, *[GARBAGE] * (BLOCK_SIZE - len(cells))]

    def checksum(self, group: int, block_id: int) -> tuple[int, ...]:
        return (self.intern("sum", *self.memory[group][block_id]),)

    def assert_reads(self, manager: KVCacheManager, key: str, seq: Model) -> None:
        """Every computed position of a sequence reads back right, in every group."""
        wanted = self.cells(seq, seq.computed)
        for group, table in enumerate(manager.table(key)):
            got = [
                self.memory[group][table[position // BLOCK_SIZE]][position % BLOCK_SIZE]
                for position in range(seq.computed)
            ]
            assert got == wanted

    def assert_checksums_hold(self, manager: KVCacheManager) -> None:
        """Whatever has checksums and is not void still holds the bytes that they are of."""
        for group, blocks in enumerate(self.memory):
            pool = manager.pool(group)
            for block_id in range(len(blocks)):
                live = pool.ref_count(block_id) > 0 or pool.key(block_id) is not None
                if live and pool.checksums(block_id):
                    assert pool.checksums(block_id) == self.checksum(group, block_id)

    def assert_pinned(self, manager: KVCacheManager, group: int, refs: Sequence[BlockRef]) -> None:
        """What a lease promised is still there, byte for byte."""
        pool = manager.pool(group)
        for ref in refs:
            assert pool.generation(ref.block_id) == ref.generation
            assert self.checksum(group, ref.block_id) == ref.checksums
