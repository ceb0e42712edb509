"""The tier seam: full blocks by content, outside of the running requests' cache. Bytes, not tensors.

A tier owns its blocks and their eviction; whoever fills a block (a pull, a copy) moves the bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from shared.types.store import BlockKey
from shared.types.transfer import BlockRef


class Filled(NamedTuple):
    """A reserved block whose bytes are in place and verified, with its producer's checksums."""

    block_id: int
    key: BlockKey
    checksums: tuple[int, ...]
    tenant: str = ""


class Tier(ABC):
    """Blocks of one KV group. A block is *reserved* (being filled), *held* (found by its key) or gone.

    Single-threaded. All of a key's content is compared on a look-up, never the hash alone. A held block
    may be evicted by ``reserve`` at any time unless it is pinned.
    """

    @abstractmethod
    def lookup(self, keys: Sequence[BlockKey]) -> list[int]:
        """Ids of the leading keys that are held. Pins nothing: ``pin`` before the next ``reserve``."""

    @abstractmethod
    def find(self, key: BlockKey) -> int | None:
        """As ``lookup``, of one key."""

    @abstractmethod
    def pin(self, ids: Sequence[int]) -> None:
        """Keep held blocks from eviction; once a call, given back by ``unpin``."""

    @abstractmethod
    def unpin(self, ids: Sequence[int]) -> None:
        """Give one pin of each back."""

    @abstractmethod
    def use(self, keys: Sequence[BlockKey]) -> None:
        """Held blocks, consecutive and in order, were used: that counts for eviction."""

    @abstractmethod
    def ref(self, block_id: int) -> BlockRef:
        """Generation and checksums of a held block, as its producer took them."""

    @abstractmethod
    def reserve(self, n: int, tenant: str = "") -> list[int]:
        """Room for at most ``n`` new blocks: fewer when pinned blocks or others' shares leave no more.
        Evicts by the tier's policy, of a prefix the tail first."""

    @abstractmethod
    def commit(self, blocks: Sequence[Filled]) -> None:
        """These blocks are held from now on. One whose content is held already is given up; one that is
        another's only by its hash takes that one's place. Consecutive blocks stand in order."""

    @abstractmethod
    def discard(self, ids: Sequence[int], *, late: bool) -> None:
        """Give reserved blocks up. ``late``: something may still write into them, so that they are
        unusable until ``settle``."""

    @abstractmethod
    def settle(self, ids: Sequence[int]) -> None:
        """Blocks that were discarded ``late`` are safe again."""
