"""The blocks of one KV group (or of the embedding arena): who owns each, and which are found by hash.

Owns ids, ref-counts, generations, checksums, the index of published blocks and the order of eviction.
Owns no memory and no request. Single-threaded: the engine's thread.

A block is always in exactly one of three states:

    used          ref-count > 0
    quarantined   ref-count 0, but a transfer may still write into it; belongs to nobody
    free          ref-count 0; *cached* while still found by hash, else *plain*
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from shared.errors import InternalError, OutOfBlocks
from shared.kv_cache.block_hash import BlockMedia
from shared.kv_cache.ledger import LedgerEntry, NullLedger
from shared.telemetry import metrics

_GENERATION_MASK = (1 << 64) - 1


class Generations(Protocol):
    """A table of one counter a block: a list, or a view of the arena's uint64 table."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...


class CacheObserver:
    """Hears when a hash becomes findable and when it no longer is. This one does nothing."""

    def stored(self, block_hash: bytes) -> None:
        """At least one published block has this hash now."""

    def removed(self, block_hash: bytes) -> None:
        """The last published block of this hash is gone."""


class BlockKey:
    """What a published block holds: its hash and all that the hash was made of. Immutable.

    ``parent`` is the whole digest of everything before the block: two keys with equal hashes are told apart
    by it, by their token ids and their media.
    """

    __slots__ = ("block_hash", "media", "parent", "token_ids")

    def __init__(
        self, block_hash: bytes, parent: bytes, token_ids: tuple[int, ...], media: BlockMedia
    ) -> None:
        self.block_hash = block_hash
        self.parent = parent
        self.token_ids = token_ids
        self.media = media

    @property
    def fields(self) -> tuple[bytes, bytes, tuple[int, ...], BlockMedia]:
        """In the order in which ``publish`` and ``lookup`` take them."""
        return self.block_hash, self.parent, self.token_ids, self.media

    def matches(self, parent: bytes, token_ids: Sequence[int], media: Sequence[tuple[str, int]]) -> bool:
        """Whether this is that content."""
        return self.parent == parent and self.token_ids == tuple(token_ids) and self.media == tuple(media)


class BlockPool:
    """``num_blocks`` blocks, ids 0 .. num_blocks - 1. Misuse raises ValueError."""

    def __init__(
        self,
        num_blocks: int,
        generations: Generations | None = None,
        observer: CacheObserver | None = None,
        ledger: NullLedger | None = None,
    ) -> None:
        if num_blocks < 1:
            raise ValueError("a pool needs at least one block")
        if generations is not None and len(generations) != num_blocks:
            raise ValueError("one generation a block is needed")
        self._num_blocks = num_blocks
        self._generations: Generations = [0] * num_blocks if generations is None else generations
        self._observer = observer or CacheObserver()
        self._ledger = ledger or NullLedger()
        self._refs = [0] * num_blocks
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._checksums: list[tuple[int, ...]] = [()] * num_blocks
        # Plain blocks are reused last-in first-out: memory that was never needed stays untouched.
        self._plain = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._holds: dict[int, int] = {}  # transfers that may still write into a block
        self._num_quarantined = 0
        self._index: dict[bytes, list[int]] = {}  # block hash -> blocks, oldest publication first
        self._num_published = 0

    # Numbers.

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can give, cached ones included."""
        return len(self._plain) + len(self._cached)

    @property
    def num_quarantined(self) -> int:
        return self._num_quarantined

    @property
    def num_used(self) -> int:
        return self._num_blocks - self.num_free - self._num_quarantined

    @property
    def num_published(self) -> int:
        """Blocks found by hash, used or free."""
        return self._num_published

    def ref_count(self, block_id: int) -> int:
        return self._refs[block_id]

    def generation(self, block_id: int) -> int:
        """How often the block was allocated; a reader's proof that it still holds what it held."""
        return int(self._generations[block_id])

    # Ownership.

    def allocate(self, n: int) -> list[int]:
        """``n`` blocks with ref-count 1, all or nothing: plain ones first, then the cached ones that
        were freed longest ago, which are no longer found from then on. Each block's generation is raised
        before it is returned. Raises OutOfBlocks (nothing changed)."""
        if n < 0:
            raise ValueError("cannot allocate fewer than no blocks")
        if n > self.num_free:
            raise OutOfBlocks(f"{n} blocks wanted, {self.num_free} free")
        return [self._take() for _ in range(n)]

    def _take(self) -> int:
        if self._plain:
            block_id = self._plain.pop()
        else:
            block_id, _ = self._cached.popitem(last=False)
            self._forget(block_id)
        self._generations[block_id] = (int(self._generations[block_id]) + 1) & _GENERATION_MASK
        self._checksums[block_id] = ()
        self._refs[block_id] = 1
        return block_id

    def share(self, ids: Iterable[int]) -> None:
        """One more reference to each: to a used block, or to a free one that is still found by hash."""
        for block_id in ids:
            if self._refs[block_id] == 0:
                if block_id not in self._cached:
                    raise ValueError(f"block {block_id} is neither used nor cached")
                del self._cached[block_id]
            self._refs[block_id] += 1

    def free(self, ids: Sequence[int]) -> None:
        """Give one reference to each back. ``ids`` in the order of a block table: the tail becomes the
        older candidate for eviction, so that a prefix is eaten from its end."""
        for block_id in reversed(ids):
            self._drop(block_id)

    def _drop(self, block_id: int) -> None:
        refs = self._refs[block_id]
        if refs == 0:
            raise ValueError(f"block {block_id} is not used")
        self._refs[block_id] = refs - 1
        if refs > 1:
            return
        if block_id in self._holds:
            self._num_quarantined += 1
        elif self._keys[block_id] is not None:
            self._cached[block_id] = None
        else:
            self._plain.append(block_id)

    def quarantine(self, ids: Sequence[int]) -> None:
        """Give one reference to each back, while a transfer may still write into it: such a block is
        found no more, and is not free again before ``release_quarantined``, one call a transfer. Other
        owners of a shared block keep it; it stays used until they are gone too."""
        for block_id in ids:
            if self._refs[block_id] == 0:
                raise ValueError(f"block {block_id} is not used")
            self._holds[block_id] = self._holds.get(block_id, 0) + 1
            self.unpublish((block_id,))
            self._drop(block_id)

    def release_quarantined(self, ids: Iterable[int]) -> None:
        """The transfer into each can land no more."""
        for block_id in ids:
            holds = self._holds.get(block_id, 0)
            if holds == 0:
                raise ValueError(f"block {block_id} is not quarantined")
            if holds > 1:
                self._holds[block_id] = holds - 1
                continue
            del self._holds[block_id]
            if self._refs[block_id] == 0:
                self._num_quarantined -= 1
                self._plain.append(block_id)

    def is_held(self, block_id: int) -> bool:
        """Whether a transfer may still write into the block (quarantined, or used by others too)."""
        return block_id in self._holds

    # Contents.

    def publish(
        self,
        block_id: int,
        block_hash: bytes,
        parent: bytes,
        token_ids: Sequence[int],
        media: Sequence[tuple[str, int]] = (),
    ) -> BlockKey:
        """Make a used, final block findable. Returns its key: the one of an earlier block with equal
        contents, if there is one; both stay findable, the earlier first. Publishing again is harmless;
        publishing other contents under the same id is refused."""
        if self._refs[block_id] == 0 or block_id in self._holds:
            raise ValueError(f"block {block_id} is free or quarantined")
        own = self._keys[block_id]
        if own is not None:
            if own.block_hash != block_hash or not own.matches(parent, token_ids, media):
                raise ValueError(f"block {block_id} is published with other contents")
            return own
        twin = self.lookup(block_hash, parent, token_ids, media)
        key = None if twin is None else self._keys[twin]
        if key is None:
            key = BlockKey(block_hash, parent, tuple(token_ids), tuple(media))
        self._keys[block_id] = key
        self._num_published += 1
        bucket = self._index.setdefault(block_hash, [])
        bucket.append(block_id)
        if len(bucket) == 1:
            self._observer.stored(block_hash)
        if sums := self._checksums[block_id]:
            entry = LedgerEntry(key.block_hash, key.parent, key.token_ids, key.media, sums)
            self._ledger.write(block_id, self.generation(block_id), entry)
        return key

    def adopt(self, entries: Mapping[int, LedgerEntry]) -> None:
        """Blocks, none of them ever allocated, hold these verified contents from an earlier life: they are
        found from now on, and free."""
        self._plain = [block_id for block_id in self._plain if block_id not in entries]
        for block_id, entry in entries.items():
            self._refs[block_id] = 1
            self._checksums[block_id] = entry.checksums
            self.publish(block_id, entry.block_hash, entry.parent, entry.token_ids, entry.media)
            self.free((block_id,))

    def lookup(
        self,
        block_hash: bytes,
        parent: bytes,
        token_ids: Sequence[int],
        media: Sequence[tuple[str, int]] = (),
    ) -> int | None:
        """The first published block with these contents; it may be free (``share`` it before anything
        else is allocated)."""
        found, collided = None, False
        for block_id in self._index.get(block_hash, ()):
            key = self._keys[block_id]
            if key is not None and key.matches(parent, token_ids, media):
                found = block_id
                break
            collided = True
        if collided:
            metrics.HASH_COLLISIONS.inc()
        return found

    def key(self, block_id: int) -> BlockKey | None:
        """What the block was published with; None when it is not findable."""
        return self._keys[block_id]

    def unpublish(self, ids: Iterable[int]) -> None:
        """Make blocks unfindable; those that are not findable anyway are ignored."""
        for block_id in ids:
            if self._keys[block_id] is None:
                continue
            self._forget(block_id)
            if block_id in self._cached:
                del self._cached[block_id]
                self._plain.append(block_id)

    def unpublish_all(self) -> None:
        """Forget every hash; owners keep their blocks."""
        self.unpublish(range(self._num_blocks))

    def _forget(self, block_id: int) -> None:
        key = self._keys[block_id]
        if key is None:
            return
        self._keys[block_id] = None
        self._ledger.clear(block_id)
        self._num_published -= 1
        bucket = self._index[key.block_hash]
        bucket.remove(block_id)
        if not bucket:
            del self._index[key.block_hash]
            self._observer.removed(key.block_hash)

    def set_checksums(self, block_id: int, checksums: tuple[int, ...]) -> None:
        """Remember the checksums (one a kv_head) of a used block; until it is written or allocated again."""
        if self._refs[block_id] == 0:
            raise ValueError(f"block {block_id} is not used")
        self._checksums[block_id] = checksums

    def checksums(self, block_id: int) -> tuple[int, ...]:
        """Empty when there are none."""
        return self._checksums[block_id]

    def is_writable(self, block_id: int) -> bool:
        """Whether the block has one owner, and neither hash nor checksums that a write would break."""
        return self._refs[block_id] == 1 and self._keys[block_id] is None and not self._checksums[block_id]

    def reopen(self, block_id: int) -> None:
        """The only owner is about to write: hash and checksums of what was there are void."""
        if self._refs[block_id] != 1:
            raise ValueError(f"block {block_id} does not have one owner")
        self.unpublish((block_id,))
        self._checksums[block_id] = ()

    def check_integrity(self) -> None:
        """Raises InternalError when any invariant is broken. Reads everything: for tests and idle times."""
        free = self._plain + list(self._cached)
        quarantined = [b for b in self._holds if self._refs[b] == 0]
        used = [b for b in range(self._num_blocks) if self._refs[b] > 0]
        _require(
            sorted(free + quarantined + used) == list(range(self._num_blocks)), "each block in one state"
        )
        _require(len(quarantined) == self._num_quarantined, "quarantine count")
        _require(all(n > 0 for n in self._holds.values()), "holds are positive")
        _require(all(self._keys[b] is None for b in self._plain), "plain blocks are not findable")
        _require(all(self._keys[b] is not None for b in self._cached), "cached blocks are findable")
        _require(all(self._keys[b] is None for b in self._holds), "quarantined blocks are not findable")
        indexed = sorted((b, h) for h, bucket in self._index.items() for b in bucket)
        keyed = [(b, k.block_hash) for b, k in enumerate(self._keys) if k is not None]
        _require(indexed == keyed, "index and keys agree")
        _require(len(keyed) == self._num_published, "published count")
        _require(all(self._index.values()), "no empty bucket")


def _require(condition: bool, invariant: str) -> None:
    if not condition:
        raise InternalError(f"block pool: broken invariant: {invariant}")
