"""The CPU tier: blocks of one group of an arena in main memory, least recently used evicted first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shared.kv_cache.block_pool import BlockPool, CacheObserver
from shared.tiering.base import Tier
from shared.transfer.arena import Arena
from shared.types.store import BlockKey
from shared.types.transfer import BlockRef


class _Evictions(CacheObserver):
    def __init__(self, evicted: Callable[[], None]) -> None:
        self._evicted = evicted

    def removed(self, block_hash: bytes) -> None:
        self._evicted()


class CpuTier(Tier):
    """See Tier. ``evicted`` is called for each content that is held no more."""

    def __init__(self, arena: Arena, group: int, evicted: Callable[[], None] = lambda: None) -> None:
        info = arena.info
        self.pool = BlockPool(info.num_blocks[group], arena.generations(group), _Evictions(evicted))

    def lookup(self, keys: Sequence[BlockKey]) -> list[int]:
        found: list[int] = []
        for key in keys:
            block_id = self.pool.lookup(key.block_hash, key.parent, key.token_ids, key.media)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def pin(self, ids: Sequence[int]) -> None:
        self.pool.share(ids)

    def unpin(self, ids: Sequence[int]) -> None:
        self.pool.free(ids)

    def ref(self, block_id: int) -> BlockRef:
        return BlockRef(block_id, self.pool.generation(block_id), self.pool.checksums(block_id))

    def reserve(self, n: int) -> list[int]:
        return self.pool.allocate(min(n, self.pool.num_free))

    def commit(self, block_id: int, key: BlockKey, checksums: tuple[int, ...]) -> None:
        self.pool.set_checksums(block_id, checksums)
        self.pool.publish(block_id, key.block_hash, key.parent, key.token_ids, key.media)
        self.pool.free((block_id,))

    def discard(self, ids: Sequence[int], *, late: bool) -> None:
        if late:
            self.pool.quarantine(ids)
        else:
            self.pool.free(ids)

    def settle(self, ids: Sequence[int]) -> None:
        self.pool.release_quarantined(ids)
