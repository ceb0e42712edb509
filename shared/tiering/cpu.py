"""The CPU tier: blocks of one group of an arena in main memory, found by hash and content."""

from __future__ import annotations

from collections.abc import Sequence

from shared.clock import Clock
from shared.kv_cache.block_hash import block_content
from shared.kv_cache.block_pool import BlockPool
from shared.tiering.base import Filled, Tier
from shared.tiering.eviction import make_policy
from shared.tiering.index import PrefixIndex
from shared.tiering.observe import MemoryObserver
from shared.tiering.shelf import Shelf, ShelfItem
from shared.transfer.arena import Arena
from shared.types.store import BlockKey
from shared.types.transfer import BlockRef


class CpuTier(Tier):
    """See Tier. ``policy`` by name (``eviction``); ``tenant_share``: see Shelf."""

    def __init__(
        self,
        arena: Arena,
        group: int,
        clock: Clock,
        *,
        policy: str = "lru",
        observer: MemoryObserver | None = None,
        tenant_share: float = 1.0,
    ) -> None:
        num_blocks = arena.info.num_blocks[group]
        self._shelf = Shelf(
            num_blocks,
            arena.info.extent_bytes[group],
            make_policy(policy, num_blocks),
            clock,
            generations=arena.generations(group),
            observer=observer,
            tenant_share=tenant_share,
        )
        self._index = PrefixIndex()
        self._keys: dict[bytes, BlockKey] = {}
        self._shelf.on_removed = self._forget

    @property
    def pool(self) -> BlockPool:
        """To be read only."""
        return self._shelf.pool

    @property
    def num_free(self) -> int:
        """Blocks that can be reserved, held but unpinned ones included."""
        return self._shelf.num_free

    @property
    def num_held(self) -> int:
        return len(self._shelf)

    def num_held_by(self, tenant: str) -> int:
        return self._shelf.num_held_by(tenant)

    def lookup(self, keys: Sequence[BlockKey]) -> list[int]:
        contents = [block_content(key.parent, key.token_ids, key.media) for key in keys]
        return self._index.longest([key.block_hash for key in keys], contents)

    def longest(self, hashes: Sequence[bytes], contents: Sequence[bytes]) -> list[int]:
        """As ``lookup``, of blocks whose contents (``block_content``) are at hand."""
        return self._index.longest(hashes, contents)

    def find(self, key: BlockKey) -> int | None:
        return self._index.get(key.block_hash, block_content(key.parent, key.token_ids, key.media))

    def before(self, key: BlockKey) -> list[BlockKey]:
        """The held blocks that lead to this one, in order, without it: from the root on, or from where memory
        has a gap."""
        return [self._keys[name] for name in self._shelf.before(key.parent)]

    def pin(self, ids: Sequence[int]) -> None:
        self._shelf.pin(ids)

    def unpin(self, ids: Sequence[int]) -> None:
        self._shelf.unpin(ids)

    def use(self, keys: Sequence[BlockKey]) -> None:
        self._shelf.use([key.block_hash for key in keys])

    def ref(self, block_id: int) -> BlockRef:
        return BlockRef(block_id, self.pool.generation(block_id), self.pool.checksums(block_id))

    def reserve(self, n: int, tenant: str = "") -> list[int]:
        return self._shelf.reserve(n, tenant)

    def commit(self, blocks: Sequence[Filled]) -> None:
        items: dict[bytes, ShelfItem] = {}
        for block_id, key, checksums, tenant in blocks:
            content = block_content(key.parent, key.token_ids, key.media)
            if self._index.get(key.block_hash, content) is not None or key.block_hash in items:
                self._shelf.discard((block_id,), late=False)
                continue
            if key.block_hash in self._shelf:
                self._shelf.remove(key.block_hash, "replaced")
            self.pool.set_checksums(block_id, checksums)
            self._index.put(key.block_hash, content, block_id)
            self._keys[key.block_hash] = key
            items[key.block_hash] = ShelfItem(key.block_hash, (block_id,), key.parent, tenant)
        self._shelf.hold(list(items.values()))

    def _forget(self, block_hash: bytes) -> None:
        self._index.pop(block_hash)
        del self._keys[block_hash]

    def discard(self, ids: Sequence[int], *, late: bool) -> None:
        self._shelf.discard(ids, late=late)

    def settle(self, ids: Sequence[int]) -> None:
        self._shelf.settle(ids)

    def check_integrity(self) -> None:
        """Raises when an invariant is broken; for tests and idle times."""
        self._shelf.check_integrity()
        if not len(self._index) == len(self._keys) == len(self._shelf):
            raise ValueError("the index and the shelf disagree")
