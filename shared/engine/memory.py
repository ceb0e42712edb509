"""The memory of a worker: its arenas, and what an earlier life of it left in them.

Owns which arenas there are and where each comes from; not the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.config import capacity
from shared.config.services import EncoderConfig, WorkerConfig
from shared.engine.backend import Backend, RunnerMemory
from shared.engine.recall import recall
from shared.kv_cache.block_pool import Generations
from shared.kv_cache.ledger import Ledger, NullLedger, slot_bytes
from shared.kv_cache.manager import KVCacheManager
from shared.transfer.arena import Arena
from shared.transfer.kept import KeptArena, open_kept
from shared.transfer.reslice import STAGE, make_stage
from shared.transfer.shards import RankGenerations, ranks_of, region_name
from shared.types.kv import KVCacheSpec


@dataclass(frozen=True)
class WorkerMemory:
    """``ledgers``: one a KV group. ``kept``: arenas that a keeper holds, of which ``old`` says that all hold
    what an earlier life left."""

    spec: KVCacheSpec
    arenas: dict[str, Arena]
    ledgers: tuple[NullLedger, ...]
    kept: tuple[KeptArena, ...] = ()
    old: bool = False

    def generations(self) -> list[Generations]:
        """The generations of each group's blocks, as one table."""
        ranks = ranks_of(self.arenas, "kv")
        found: list[Generations] = []
        for group in range(len(self.spec.groups)):
            tables = [kv.generations(group) for kv in ranks]
            found.append(tables[0] if len(tables) == 1 else RankGenerations(tables))
        return found

    def recall(self, kv: KVCacheManager) -> int:
        """Make what an earlier life committed findable in the fresh ``kv``; returns how many blocks."""
        ranks, num_found = ranks_of(self.arenas, "kv"), 0
        for group, ledger in enumerate(self.ledgers if self.old else ()):
            if isinstance(ledger, Ledger):
                num_heads = self.spec.groups[group].num_kv_heads
                num_found += recall(kv.pool(group), ledger, ranks, group, num_heads)
        return num_found

    def for_runner(self, rows_per_block: int) -> RunnerMemory:
        """The block data, as runners take it."""
        return runner_memory(self.arenas, rows_per_block)

    def close(self) -> None:
        """Unmap everything and give claims up; what a keeper holds stays there."""
        for arena in self.arenas.values():
            arena.close()
        for kept in self.kept:
            kept.close()


def make_memory(config: WorkerConfig, backend: Backend, incarnation: str) -> WorkerMemory:
    """The arenas of a prefill or decode worker: for KV one a rank, with its share of every block; ``ec``; and
    the stage. Raises ConfigError."""
    spec = backend.cache_spec(config.kv.block_size)
    others = {
        "ec": make_ec_arena(config.encoder, backend.row_bytes, incarnation),
        STAGE: make_stage(spec.groups, incarnation),
    }
    num_ranks, num_blocks = backend.tp_size, capacity.kv_blocks(config.kv, spec)
    sizes = (num_blocks,) * len(spec.groups)
    extents = tuple(group.extent_bytes(spec.block_size) // num_ranks for group in spec.groups)
    names = [region_name("kv", rank, num_ranks) for rank in range(num_ranks)]
    if not (config.kv.keeper and config.kv.prefix_caching):
        plain = {name: Arena.create(name, sizes, extents, incarnation) for name in names}
        return WorkerMemory(spec, {**plain, **others}, (NullLedger(),) * len(spec.groups))
    slots = [slot_bytes(spec.block_size, group.num_kv_heads) for group in spec.groups]
    kept = tuple(
        open_kept(
            config.kv.keeper,
            config.worker_id,
            backend.identity,
            backend.layout(config.kv.block_size),
            name,
            sizes,
            extents,
            incarnation,
            ledger_bytes=0 if rank else num_blocks * sum(slots),
        )
        for rank, name in enumerate(names)
    )
    old = all(arena.old for arena in kept)
    arenas = {name: one.arena for name, one in zip(names, kept, strict=True)}
    ledgers = _ledgers(arenas[names[0]], num_blocks, slots, blank=not old)
    return WorkerMemory(spec, {**arenas, **others}, ledgers, kept, old)


def _ledgers(arena: Arena, num_blocks: int, slots: list[int], *, blank: bool) -> tuple[Ledger, ...]:
    """Those of all groups, one behind the other in the first rank's arena."""
    book, at, ledgers = arena.ledger(), 0, []
    if blank:
        book[:] = bytes(book.nbytes)
    for slot in slots:
        ledgers.append(Ledger(book[at : at + num_blocks * slot], num_blocks, slot))
        at += num_blocks * slot
    return tuple(ledgers)


def make_ec_arena(encoder: EncoderConfig, row_bytes: int, incarnation: str) -> Arena:
    """An arena of embedding rows. Raises ConfigError when the memory holds less than a block of them."""
    num_blocks, extent = capacity.embedding_blocks(encoder, row_bytes), encoder.rows_per_block * row_bytes
    return Arena.create("ec", (num_blocks,), (extent,), incarnation)


def runner_memory(arenas: dict[str, Arena], rows_per_block: int) -> RunnerMemory:
    """The block data of the arenas, as runners take it."""
    ranks = ranks_of(arenas, "kv")
    views = [kv.data(group) for kv in ranks for group in range(len(kv.info.num_blocks))]
    return RunnerMemory(tuple(views), arenas["ec"].data(0), rows_per_block)
