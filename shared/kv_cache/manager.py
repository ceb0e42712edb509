"""Which blocks each sequence holds, in every KV group: prefix hits, growth, copy-on-write, commit.

Owns block tables, token histories and the pools. Owns no memory, no policy and no transfer: it says which
block is whose, and callers move bytes accordingly. All groups have blocks of equal size, so block *index* i
covers the same positions everywhere; ids, ref-counts and quarantine are per group. Groups with a window hold
all their blocks for now. Single-threaded: the engine's thread. Unknown sequence keys raise KeyError.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from shared.errors import InternalError, OutOfBlocks
from shared.kv_cache import sealing
from shared.kv_cache.block_hash import BlockHasher, BlockMedia, media_by_block
from shared.kv_cache.block_pool import BlockKey, BlockPool, CacheObserver, Generations
from shared.kv_cache.ledger import NullLedger
from shared.kv_cache.sealing import Checksums
from shared.kv_cache.segments import segment_start
from shared.kv_cache.sequence import SequenceState
from shared.step import BlockCopy
from shared.types.kv import KVCacheSpec
from shared.types.request import MediaItem
from shared.types.store import tenant_of
from shared.types.transfer import BlockRef

_NOTHING_IN_FLIGHT: Mapping[int, Sequence[int]] = {}


class CommittedBlock(Struct, frozen=True):
    """A block that became final: where it is, what it holds, and how a copy is verified.

    ``index`` is its place in the block table of ``group``; ``segment`` the hash of its segment's first block;
    ``tenant`` whose it is (``tenant_of`` the salt).
    """

    group: int
    index: int
    block_id: int
    block_hash: bytes
    parent: bytes
    token_ids: tuple[int, ...]
    media: BlockMedia
    ref: BlockRef
    segment: bytes
    tenant: str = ""


class KVCacheManager:
    """The KV blocks of one worker. One pool a group, of ``num_blocks[group]`` blocks.

    ``observer`` hears of hashes that come and go in group 0, which stands for all. ``ledgers``, one a group,
    are told what the blocks hold, for a next life. With
    ``prefix_caching`` off, blocks are hashed and committed but never found.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: Sequence[int],
        hasher: BlockHasher,
        generations: Sequence[Generations] | None = None,
        *,
        prefix_caching: bool = True,
        observer: CacheObserver | None = None,
        ledgers: Sequence[NullLedger] | None = None,
    ) -> None:
        if not spec.groups or len(num_blocks) != len(spec.groups):
            raise ValueError("one number of blocks a group is needed")
        if hasher.block_size != spec.block_size:
            raise ValueError("hasher and spec differ in block_size")
        tables = generations if generations is not None else [None] * len(num_blocks)
        books = ledgers if ledgers is not None else [NullLedger()] * len(num_blocks)
        self.spec = spec
        self._block_size = spec.block_size
        self._pools = tuple(
            BlockPool(n, table, observer if group == 0 else None, book)
            for group, (n, table, book) in enumerate(zip(num_blocks, tables, books, strict=True))
        )
        self._hasher = hasher
        self._prefix_caching = prefix_caching
        self._sequences: dict[str, SequenceState] = {}
        self._pins: tuple[Counter[int], ...] = tuple(Counter() for _ in self._pools)

    # A sequence's life.

    def open(
        self,
        key: str,
        token_ids: Sequence[int],
        media: Sequence[MediaItem],
        cache_salt: str,
        adapter: str,
        max_cached_tokens: int,
    ) -> int:
        """Begin a sequence and share the published blocks of its prefix, as far as every group has them
        and within ``max_cached_tokens``. Returns the tokens so cached: whole blocks. ValueError if the key is
        open."""
        self._refuse_open(key)
        seq = SequenceState(
            token_ids,
            media_by_block(media, self._block_size),
            self._hasher.root(cache_salt, adapter),
            [[] for _ in self._pools],
            tenant_of(cache_salt),
        )
        if self._prefix_caching:
            self._share_prefix(seq, max_cached_tokens // self._block_size)
        self._sequences[key] = seq
        return len(seq.keys) * self._block_size

    def _share_prefix(self, seq: SequenceState, max_blocks: int) -> None:
        for index in range(min(max_blocks, len(seq.token_ids) // self._block_size)):
            key = self._key_at(seq, index)
            hits = [pool.lookup(*key.fields) for pool in self._pools]
            found = [block_id for block_id in hits if block_id is not None]
            if len(found) < len(hits):
                break
            for table, block_id in zip(seq.tables, found, strict=True):
                table.append(block_id)
            seq.keys.append(key)
        for pool, table in zip(self._pools, seq.tables, strict=True):
            pool.share(table)

    def _key_at(self, seq: SequenceState, index: int) -> BlockKey:
        """What block ``index`` holds; the blocks before it have their keys."""
        parent = self._hasher.digest(*seq.keys[index - 1].fields) if index else seq.root
        ids = tuple(seq.token_ids[index * self._block_size : (index + 1) * self._block_size])
        media = seq.media.get(index, ())
        return BlockKey(self._hasher.chain(parent, ids, media), parent, ids, media)

    def append(self, key: str, token_ids: Iterable[int]) -> None:
        """Newly known tokens at the end of the history (never placeholders): they will be hashed."""
        self._sequences[key].token_ids.extend(token_ids)

    def reserve(self, key: str, num_tokens: int, *, writable_from: int) -> list[BlockCopy]:
        """Make positions [0, num_tokens) have blocks and [writable_from, num_tokens) writable.

        A shared block in the writable range is replaced by a fresh one; where it also holds positions
        before ``writable_from``, a copy is returned, to be made before anything is written. A block of our
        own there loses its hash and checksums. Raises OutOfBlocks (nothing changed).
        """
        seq = self._sequences[key]
        need = -(-num_tokens // self._block_size)
        first = writable_from // self._block_size if writable_from < num_tokens else need
        missing = need - len(seq.tables[0])
        if missing <= 0 and self._writable(seq, first, need):
            copies: list[BlockCopy] = []
        else:
            self._ensure_free(seq, first, need)
            copies = self._make_writable(seq, first, need, writable_from)
            for pool, table in zip(self._pools, seq.tables, strict=True):
                table += pool.allocate(max(0, missing))
        if first < need:
            seq.write_start = writable_from
            seq.rewind(writable_from, first)
        return copies

    def _writable(self, seq: SequenceState, first: int, stop: int) -> bool:
        """Whether blocks first .. stop - 1 of every table can be written as they are."""
        for pool, table in zip(self._pools, seq.tables, strict=True):
            for index in range(first, stop):
                if not pool.is_writable(table[index]):
                    return False
        return True

    def _ensure_free(self, seq: SequenceState, first: int, need: int) -> None:
        for pool, table in zip(self._pools, seq.tables, strict=True):
            wanted = max(0, need - len(table))
            wanted += sum(pool.ref_count(block_id) > 1 for block_id in table[first:need])
            if wanted > pool.num_free:
                raise OutOfBlocks(f"{wanted} blocks wanted, {pool.num_free} free")

    def _make_writable(
        self, seq: SequenceState, first: int, stop: int, writable_from: int
    ) -> list[BlockCopy]:
        copies: list[BlockCopy] = []
        for group, (pool, table) in enumerate(zip(self._pools, seq.tables, strict=True)):
            for index in range(first, min(stop, len(table))):
                src = table[index]
                if pool.ref_count(src) == 1:
                    pool.reopen(src)
                    continue
                table[index] = pool.allocate(1)[0]
                if index * self._block_size < writable_from:
                    copies.append(BlockCopy(group, src, table[index]))
                pool.free((src,))
        return copies

    def fork(self, key: str, child_key: str) -> None:
        """Begin ``child_key`` as a twin: it shares every block and the history up to now. ValueError if
        that key is open."""
        self._refuse_open(child_key)
        child = self._sequences[key].fork()
        for pool, table in zip(self._pools, child.tables, strict=True):
            pool.share(table)
        self._sequences[child_key] = child

    def replace(self, key: str, group: int, indices: Sequence[int]) -> list[int]:
        """Put fresh blocks at these table indices, the former ones into quarantine, and return those.
        Raises OutOfBlocks or IndexError (nothing changed)."""
        seq, pool = self._sequences[key], self._pools[group]
        table = seq.tables[group]
        indices = _checked(indices, len(table))
        if not indices:
            return []
        fresh = pool.allocate(len(indices))
        stale = [table[index] for index in indices]
        pool.quarantine(stale)
        for index, block_id in zip(indices, fresh, strict=True):
            table[index] = block_id
        seq.rewind(indices[0] * self._block_size, indices[0])
        return stale

    def close(
        self, key: str, in_flight: Mapping[int, Sequence[int]] = _NOTHING_IN_FLIGHT
    ) -> dict[int, list[int]]:
        """End a sequence and give its blocks back; those at the ``in_flight`` table indices (by group) go
        to quarantine and are returned, by group. IndexError on a bad index (nothing changed).

        Freed blocks may be handed out at once: to the next step (which runs after those launched before),
        but a *transfer* into them must wait until every step launched before has ended.
        """
        seq = self._sequences[key]
        flying = {group: _checked(indices, len(seq.tables[group])) for group, indices in in_flight.items()}
        del self._sequences[key]
        quarantined: dict[int, list[int]] = {}
        for group, (pool, table) in enumerate(zip(self._pools, seq.tables, strict=True)):
            indices = flying.get(group)
            if not indices:
                pool.free(table)
                continue
            skip = set(indices)
            quarantined[group] = [table[index] for index in indices]
            pool.quarantine(quarantined[group])
            pool.free([block_id for index, block_id in enumerate(table) if index not in skip])
        return quarantined

    # From computed to findable.

    def sealable(self, key: str, num_computed: int, *, tail: bool = False) -> list[tuple[int, int, int]]:
        """Blocks (group, index, block id) whose checksums the step that computes up to ``num_computed``
        should make: full ones and, with ``tail``, the partly filled last one. Each is named once, unless it
        is written again."""
        return sealing.sealable(self._sequences[key], self._pools, num_computed, self._block_size, tail)

    def commit(self, key: str, num_computed: int, checksums: Checksums) -> list[CommittedBlock]:
        """The step up to ``num_computed`` has run; ``checksums`` (by group and block id; may name other
        sequences' blocks too) are of what it wrote. Publishes the newly full blocks whose tokens are all
        known, and returns them in table order. The partly filled tail only keeps its checksums."""
        seq = self._sequences[key]
        if num_computed > len(seq.tables[0]) * self._block_size:
            raise ValueError("more tokens computed than blocks were reserved for")
        if seq.tainted:
            return []
        if checksums:
            sealing.keep(seq, self._pools, num_computed, self._block_size, checksums)
        num_full = min(num_computed, len(seq.token_ids)) // self._block_size
        committed: list[CommittedBlock] = []
        for index in range(len(seq.keys), num_full):
            self._commit_block(committed, seq, index)
        return committed

    def _commit_block(self, committed: list[CommittedBlock], seq: SequenceState, index: int) -> None:
        own = self._key_at(seq, index)
        start = segment_start(index)
        segment = own.block_hash if start == index else seq.keys[start].block_hash
        for group, (pool, table) in enumerate(zip(self._pools, seq.tables, strict=True)):
            block_id = table[index]
            if self._prefix_caching and not pool.is_held(block_id):
                pool.publish(block_id, *own.fields)
            ref = self._ref(pool, block_id)
            committed.append(CommittedBlock(group, index, block_id, *own.fields, ref, segment, seq.tenant))
        seq.keys.append(own)

    def committed(self, key: str, group: int, first: int, count: int) -> list[BlockRef]:
        """References to blocks first .. first + count - 1 of the table: committed ones, or a sealed tail.
        IndexError beyond the table, ValueError for a block that may still change."""
        seq, pool = self._sequences[key], self._pools[group]
        table = seq.tables[group]
        refs: list[BlockRef] = []
        for index in _checked(range(first, first + count), len(table)):
            ref = self._ref(pool, table[index])
            if index >= len(seq.keys) and not ref.checksums:
                raise ValueError(f"block {index} of the table is not committed")
            refs.append(ref)
        return refs

    @staticmethod
    def _ref(pool: BlockPool, block_id: int) -> BlockRef:
        return BlockRef(block_id, pool.generation(block_id), pool.checksums(block_id))

    def invalidate(self, key: str) -> None:
        """The sequence's KV must not be used (non-finite results): blocks that only it owns are found no
        more, and it commits nothing from now on."""
        seq = self._sequences[key]
        seq.tainted = True
        for pool, table in zip(self._pools, seq.tables, strict=True):
            pool.unpublish(block_id for block_id in table if pool.ref_count(block_id) == 1)

    def reset_prefix_cache(self) -> None:
        """Nothing that is published now is found any more; sequences keep their blocks."""
        for pool in self._pools:
            pool.unpublish_all()

    # Blocks that outlive their sequence.

    def pin(self, group: int, ids: Sequence[int]) -> None:
        """One more owner of these used or cached blocks, until ``unpin``."""
        self._pools[group].share(ids)
        self._pins[group].update(ids)

    def unpin(self, group: int, ids: Sequence[int]) -> None:
        """Undo one ``pin``; ids in table order."""
        pins = self._pins[group]
        if any(pins[block_id] < count for block_id, count in Counter(ids).items()):
            raise ValueError("unpin of blocks that are not pinned")
        pins.subtract(ids)
        self._pools[group].free(ids)

    def release_quarantined(self, group: int, ids: Iterable[int]) -> None:
        """The transfers into these blocks can land no more."""
        self._pools[group].release_quarantined(ids)

    # Questions.

    def is_open(self, key: str) -> bool:
        return key in self._sequences

    @property
    def open_keys(self) -> tuple[str, ...]:
        return tuple(self._sequences)

    def table(self, key: str, start: int = 0) -> tuple[tuple[int, ...], ...]:
        """Each group's block table from index ``start`` on."""
        return tuple(tuple(table[start:]) for table in self._sequences[key].tables)

    def table_len(self, key: str) -> int:
        """Blocks in each table (equal in all groups)."""
        return len(self._sequences[key].tables[0])

    def pool(self, group: int) -> BlockPool:
        """The pool of a group, to be read only."""
        return self._pools[group]

    def num_blocks(self, group: int | None = None) -> int:
        """Of one group, or of all; so for the other counts."""
        return sum(pool.num_blocks for pool in self._of(group))

    def num_free(self, group: int | None = None) -> int:
        return sum(pool.num_free for pool in self._of(group))

    def num_used(self, group: int | None = None) -> int:
        return sum(pool.num_used for pool in self._of(group))

    def num_quarantined(self, group: int | None = None) -> int:
        return sum(pool.num_quarantined for pool in self._of(group))

    @property
    def num_cached_tokens(self) -> int:
        """Token positions found by hash (in group 0)."""
        return self._pools[0].num_published * self._block_size

    def check_integrity(self) -> None:
        """Raises InternalError when a block has more or fewer owners than its ref-count says, or any
        other invariant is broken. Reads everything: for tests and idle times."""
        for group, pool in enumerate(self._pools):
            pool.check_integrity()
            owners = Counter(+self._pins[group])
            for seq in self._sequences.values():
                owners.update(seq.tables[group])
            if owners != +Counter({b: pool.ref_count(b) for b in range(pool.num_blocks)}):
                raise InternalError(f"KV group {group}: ref-counts and owners differ")
        for seq in self._sequences.values():
            if len({len(table) for table in seq.tables}) != 1 or len(seq.keys) > len(seq.tables[0]):
                raise InternalError("block tables of unequal length, or shorter than what is committed")

    def _of(self, group: int | None) -> tuple[BlockPool, ...]:
        return self._pools if group is None else (self._pools[group],)

    def _refuse_open(self, key: str) -> None:
        if key in self._sequences:
            raise ValueError("a sequence of this key is open")


def _checked(indices: Iterable[int], length: int) -> list[int]:
    """The indices in order, each once. IndexError outside 0 .. length - 1."""
    ordered = sorted(set(indices))
    if ordered and (ordered[0] < 0 or ordered[-1] >= length):
        raise IndexError("block table index out of range")
    return ordered
