"""The tier seam: full blocks by content, outside of the running requests' cache. Bytes, not tensors.

A tier owns its blocks and their eviction; whoever fills a block (a pull, a copy) moves the bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from shared.types.store import BlockKey
from shared.types.transfer import BlockRef


class Tier(ABC):
    """Blocks of one KV group. A block is *reserved* (being filled), *held* (found by its key) or gone.

    Single-threaded. ``block_size`` tokens and all of a key's content are compared on a look-up, never
    the hash alone. A held block may be evicted by ``reserve`` at any time unless it is pinned.
    """

    @abstractmethod
    def lookup(self, keys: Sequence[BlockKey]) -> list[int]:
        """Ids of the leading keys that are held. Pins nothing: ``pin`` before the next ``reserve``."""

    @abstractmethod
    def pin(self, ids: Sequence[int]) -> None:
        """Keep held blocks from eviction; once a call, given back by ``unpin``."""

    @abstractmethod
    def unpin(self, ids: Sequence[int]) -> None:
        """Give one pin of each back; they become the most recently used. ``ids`` in prefix order."""

    @abstractmethod
    def ref(self, block_id: int) -> BlockRef:
        """Generation and checksums of a held block, as its producer took them."""

    @abstractmethod
    def reserve(self, n: int) -> list[int]:
        """Room for at most ``n`` new blocks: fewer when pinned blocks leave no more. Evicts the least
        recently used held blocks."""

    @abstractmethod
    def commit(self, block_id: int, key: BlockKey, checksums: tuple[int, ...]) -> None:
        """A reserved block is filled and verified: it is held from now on."""

    @abstractmethod
    def discard(self, ids: Sequence[int], *, late: bool) -> None:
        """Give reserved blocks up. ``late``: something may still write into them, so that they are
        unusable until ``settle``."""

    @abstractmethod
    def settle(self, ids: Sequence[int]) -> None:
        """Blocks that were discarded ``late`` are safe again."""
