"""Which embeddings the ``ec`` arena holds, by mm_hash, and who is using them.

Owns entries, their users and the order of eviction, on top of a block pool. Owns no rows and no encoder.
Single-threaded: the engine's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import msgspec
from msgspec import Struct

from shared.errors import InternalError, OutOfBlocks
from shared.kv_cache.block_pool import BlockPool

PENDING, READY = "pending", "ready"


class EncoderCacheEntry(Struct, frozen=True):
    """One media item's embeddings: ``num_rows`` rows packed into ``block_ids`` in order. ``checksum``
    covers the valid bytes and is 0 while the entry is PENDING (being encoded, or on its way here)."""

    mm_hash: str
    num_rows: int
    block_ids: tuple[int, ...]
    state: str = PENDING
    checksum: int = 0


class EncoderCache:
    """Embeddings over the blocks of ``pool``, which nobody else may allocate from.

    An entry lives while it has users; after that it stays findable until its blocks are needed.
    A PENDING entry is never evicted: somebody is writing it.
    """

    def __init__(self, pool: BlockPool, rows_per_block: int) -> None:
        if rows_per_block < 1:
            raise ValueError("rows_per_block must be positive")
        self._pool = pool
        self._rows_per_block = rows_per_block
        self._entries: dict[str, EncoderCacheEntry] = {}
        self._users: dict[str, set[str]] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()  # READY without users, oldest first

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_rows(self) -> int:
        """Rows of all entries."""
        return sum(entry.num_rows for entry in self._entries.values())

    def num_blocks_for(self, num_rows: int) -> int:
        """Blocks that ``num_rows`` rows fill, the last one perhaps partly."""
        return -(-num_rows // self._rows_per_block)

    def get(self, mm_hash: str) -> EncoderCacheEntry | None:
        """The entry as it stands; using it takes ``acquire``."""
        return self._entries.get(mm_hash)

    def users(self, mm_hash: str) -> frozenset[str]:
        """Who holds the entry; empty for an unknown one."""
        return frozenset(self._users.get(mm_hash, ()))

    def acquire(self, mm_hash: str, user: str) -> EncoderCacheEntry | None:
        """Hold the entry for ``user``, PENDING or READY; None when there is none."""
        entry = self._entries.get(mm_hash)
        if entry is not None:
            self._users[mm_hash].add(user)
            self._idle.pop(mm_hash, None)
        return entry

    def allocate(self, mm_hash: str, num_rows: int, user: str) -> EncoderCacheEntry:
        """A new PENDING entry held by ``user``; evicts idle entries, oldest first, as needed.
        Raises OutOfBlocks (nothing changed), ValueError if the hash is known or there are no rows."""
        if mm_hash in self._entries or num_rows < 1:
            raise ValueError("an entry needs a new mm_hash and at least one row")
        wanted = self.num_blocks_for(num_rows)
        victims: list[str] = []
        available = self._pool.num_free
        for idle in self._idle:
            if available >= wanted:
                break
            victims.append(idle)
            available += len(self._entries[idle].block_ids)
        if available < wanted:
            raise OutOfBlocks(f"{wanted} embedding blocks wanted, {available} free")
        for victim in victims:
            self._pool.free(self._remove(victim).block_ids)
        entry = EncoderCacheEntry(mm_hash, num_rows, tuple(self._pool.allocate(wanted)))
        self._entries[mm_hash] = entry
        self._users[mm_hash] = {user}
        return entry

    def commit(self, mm_hash: str, checksum: int) -> EncoderCacheEntry:
        """The rows of a PENDING entry are in place: READY. KeyError, or ValueError if not PENDING."""
        entry = msgspec.structs.replace(self._pending(mm_hash), state=READY, checksum=checksum)
        self._entries[mm_hash] = entry
        if not self._users[mm_hash]:
            self._idle[mm_hash] = None
        return entry

    def fail(self, mm_hash: str, *, quarantine: bool) -> tuple[int, ...]:
        """The rows of a PENDING entry will not come: forget it and its users. With ``quarantine`` a
        transfer may still write: the blocks go to quarantine and are returned. Raises as ``commit``."""
        block_ids = self._pending(mm_hash).block_ids
        self._remove(mm_hash)
        if quarantine:
            self._pool.quarantine(block_ids)
            return block_ids
        self._pool.free(block_ids)
        return ()

    def release(self, mm_hash: str, user: str) -> None:
        """``user`` needs the entry no more; unknown pairs are ignored."""
        users = self._users.get(mm_hash)
        if users is None or user not in users:
            return
        users.remove(user)
        if not users and self._entries[mm_hash].state == READY:
            self._idle[mm_hash] = None

    def release_quarantined(self, ids: Iterable[int]) -> None:
        """The transfers into these blocks can land no more."""
        self._pool.release_quarantined(ids)

    def check_integrity(self) -> None:
        """Raises InternalError when entries, users and blocks disagree. Reads everything."""
        self._pool.check_integrity()
        owned = [block_id for entry in self._entries.values() for block_id in entry.block_ids]
        idle = {h for h, e in self._entries.items() if e.state == READY and not self._users[h]}
        if len(owned) != len(set(owned)) or len(owned) != self._pool.num_used:
            raise InternalError("encoder cache: blocks without an entry, or of two")
        if any(len(e.block_ids) != self.num_blocks_for(e.num_rows) for e in self._entries.values()):
            raise InternalError("encoder cache: an entry of the wrong size")
        if idle != set(self._idle) or self._users.keys() != self._entries.keys():
            raise InternalError("encoder cache: users and idle entries disagree")

    def _pending(self, mm_hash: str) -> EncoderCacheEntry:
        entry = self._entries[mm_hash]
        if entry.state != PENDING:
            raise ValueError("the entry is not pending")
        return entry

    def _remove(self, mm_hash: str) -> EncoderCacheEntry:
        del self._users[mm_hash]
        self._idle.pop(mm_hash, None)
        return self._entries.pop(mm_hash)
