"""The store of embeddings: media items' rows by all that decides them, over the same tiers as KV blocks.

Owns entries, offers and leases of one identity and one row format. Single-threaded: the event loop. It never
waits; ends come by callback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import structs

from shared.clock import Clock, Entropy
from shared.kv_cache.leases import LeaseTable
from shared.telemetry import metrics
from shared.tiering.demotion import Candidate
from shared.tiering.eviction import make_policy
from shared.tiering.kv_store import Limits
from shared.tiering.lower import LowerTiers
from shared.tiering.observe import TierMetrics
from shared.tiering.offload import StoreItem
from shared.tiering.promotion import Load
from shared.tiering.pulls import Pulls
from shared.tiering.record import (
    EmbeddingRecord,
    Record,
    decode_header,
    encode_header,
    verify,
)
from shared.tiering.shelf import Shelf, ShelfItem
from shared.transfer.arena import Arena
from shared.transfer.handoff import BlockPull, PackedCheck, PullOutcome
from shared.types.identity import IdentityKey
from shared.types.store import EmbeddingHit, EmbeddingKey
from shared.types.transfer import AgentInfo, BlockRef, EcTransferParams

MISS = EmbeddingHit()
REGION = "ec"


class RowFormat(NamedTuple):
    """How rows lie in blocks: ``rows_per_block`` rows of ``row_bytes`` each, packed."""

    rows_per_block: int
    row_bytes: int
    dtype: str

    @property
    def extent_bytes(self) -> int:
        return self.rows_per_block * self.row_bytes


@dataclass(slots=True, eq=False)
class _Rows:
    """One item's rows in memory, with the producer's checksum."""

    content: EmbeddingRecord
    blocks: tuple[int, ...]
    checksum: int = 0


class EmbeddingStore:
    """Holds embeddings of ``rows`` in ``arena``, each in blocks of its own; ``agent_info`` says where."""

    def __init__(
        self,
        identity: IdentityKey,
        rows: RowFormat,
        arena: Arena,
        agent_info: Callable[[], AgentInfo],
        pulls: Pulls,
        lower: LowerTiers,
        clock: Clock,
        entropy: Entropy,
        limits: Limits,
    ) -> None:
        self.rows = rows
        self._identity = identity
        self._arena = arena
        self._agent_info = agent_info
        self._pulls = pulls
        self._lower = lower
        self._entropy = entropy
        num_blocks = arena.info.num_blocks[0]
        self._shelf = Shelf(
            num_blocks,
            rows.extent_bytes,
            make_policy(limits.policy, num_blocks),
            clock,
            generations=arena.generations(0),
            observer=TierMetrics("embeddings"),
        )
        self._held: dict[bytes, _Rows] = {}
        self._shelf.on_removed = self._held.__delitem__
        self._queries = metrics.TIER_QUERIES.labels("embeddings")
        self._hits = metrics.TIER_HITS.labels("embeddings")
        self._coming: dict[bytes, list[Callable[[], None]]] = {}
        self._leases = LeaseTable(clock, limits.lease_s)
        self._lease_s = limits.lease_s
        self._pinned: dict[str, tuple[int, ...]] = {}

    def offer(self, key: EmbeddingKey, params: EcTransferParams, done: Callable[[bool], None]) -> None:
        """Pull these rows if they are not in memory yet; then call ``done``, once, with whether they are. The
        producer keeps them as they are until then."""
        name = self._name(key)
        if name in self._held:
            self._shelf.use((name,))
            self._used(name)
            done(self._has(name, key))
            return
        blocks = self._reserve(key) if self._is_sound(key, params) and name not in self._coming else ()
        if not blocks:
            done(False)
            return
        self._coming[name] = []
        remote = zip(params.block_ids, params.generations, blocks, strict=True)

        def landed(outcome: PullOutcome) -> None:
            good = all(outcome.ok)
            if not good:
                self._shelf.discard(blocks, late=not outcome.terminal)
            self._arrived(name, _Rows(_content(key), blocks, params.checksum) if good else None)
            if good:
                self._used(name)
            done(good)

        self._pulls.begin(
            params.producer,
            0,
            [BlockPull(BlockRef(block_id, generation, ()), local) for block_id, generation, local in remote],
            landed,
            lambda: self._shelf.settle(blocks),
            packed=PackedCheck(key.num_rows * key.row_bytes, params.checksum),
        )

    def lookup(self, key: EmbeddingKey, done: Callable[[EmbeddingHit], None]) -> None:
        """Call ``done``, once, with the rows pinned until ``release`` or the lease's end: at once when memory
        decides it, else when they were loaded, or the deadline has passed."""
        self.expire()
        name = self._name(key)
        self._queries.inc()
        if name in self._held:
            self._hits.inc()
            done(self._hit(name, key))
            return
        if name not in self._coming and not self._begin_load(name, key):
            done(MISS)
            return
        answered = False

        def answer() -> None:
            nonlocal answered
            if not answered:
                answered = True
                done(self._hit(name, key))

        self._coming[name].append(answer)
        self._lower.reactor.later(self._lower.deadline_s, answer)

    def release(self, lease_ids: Sequence[str]) -> None:
        """End leases; unknown ones are ignored."""
        for lease_id in lease_ids:
            if self._leases.release(lease_id):
                self._shelf.unpin(self._pinned.pop(lease_id))

    def expire(self) -> None:
        """End the leases whose time is over; call it now and then."""
        for lease_id in self._leases.expired():
            metrics.LEASES_EXPIRED.labels("store").inc()
            self._shelf.unpin(self._pinned.pop(lease_id))

    # Numbers.

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def num_blocks(self) -> int:
        return self._shelf.pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be reserved, held but unpinned ones included."""
        return self._shelf.num_free

    @property
    def num_quarantined(self) -> int:
        return self._shelf.pool.num_quarantined

    @property
    def num_held(self) -> int:
        """Items that are found by their key."""
        return len(self._held)

    def check_integrity(self) -> None:
        """Raises when an invariant is broken; for tests and idle times."""
        self._shelf.check_integrity()
        if len(self._shelf) != len(self._held):
            raise ValueError("entries and the shelf disagree")

    # Inside.

    def _name(self, key: EmbeddingKey) -> bytes:
        return Record(self._identity, None, _content(key), (0,), key.num_rows * key.row_bytes).key

    def _is_sound(self, key: EmbeddingKey, params: EcTransferParams) -> bool:
        rows, regions = self.rows, {region.name: region for region in params.producer.regions}
        return (
            (params.num_rows, params.row_bytes, params.dtype) == (key.num_rows, key.row_bytes, key.dtype)
            and (key.row_bytes, key.dtype) == (rows.row_bytes, rows.dtype)
            and len(params.block_ids) == len(params.generations) == self._num_blocks(key)
            and REGION in regions
            and regions[REGION].extent_bytes == (rows.extent_bytes,)
        )

    def _num_blocks(self, key: EmbeddingKey) -> int:
        return -(-key.num_rows // self.rows.rows_per_block)

    def _reserve(self, key: EmbeddingKey) -> tuple[int, ...]:
        """Room for all rows, or none."""
        ids = self._shelf.reserve(self._num_blocks(key))
        if len(ids) < self._num_blocks(key):
            self._shelf.discard(ids, late=False)
            return ()
        return tuple(ids)

    def _arrived(self, name: bytes, rows: _Rows | None) -> None:
        """What was coming is here, or will not come."""
        if rows is not None:
            self._held[name] = rows
            self._shelf.hold((ShelfItem(name, rows.blocks),))
        for waiting in self._coming.pop(name):
            waiting()

    def _has(self, name: bytes, key: EmbeddingKey) -> bool:
        """The name leaves the shape out, since that follows from the rest; unless somebody is wrong."""
        return name in self._held and self._held[name].content == _content(key)

    def _hit(self, name: bytes, key: EmbeddingKey) -> EmbeddingHit:
        if not self._has(name, key):
            return MISS
        rows = self._held[name]
        self._shelf.pin(rows.blocks)
        self._shelf.use((name,))
        lease_id = self._entropy.hex_id()
        self._pinned[lease_id] = rows.blocks
        self._leases.grant(lease_id)
        metrics.LEASES_GRANTED.labels("store").inc()
        self._used(name)
        pool, content = self._shelf.pool, rows.content
        params = EcTransferParams(
            handoff_id=lease_id,
            producer=self._agent_info(),
            mm_hash=content.media_hash.hex(),
            num_rows=content.num_rows,
            row_bytes=content.row_bytes,
            dtype=content.dtype,
            block_ids=rows.blocks,
            generations=tuple(pool.generation(block_id) for block_id in rows.blocks),
            checksum=rows.checksum,
        )
        return EmbeddingHit(lease_id, self._lease_s, params)

    def _parts(self, rows: _Rows) -> list[memoryview]:
        """The valid bytes of its blocks, in order."""
        left = rows.content.num_rows * rows.content.row_bytes
        parts = []
        for block_id in rows.blocks:
            parts.append(self._arena.block(0, block_id)[: min(left, self.rows.extent_bytes)])
            left -= parts[-1].nbytes
        return parts

    # From and to lower tiers. Their records are contiguous, ours are in blocks: rows are copied between.

    def _begin_load(self, name: bytes, key: EmbeddingKey) -> bool:
        lower, formats = self._lower, (key.row_bytes, key.dtype) == (self.rows.row_bytes, self.rows.dtype)
        if not formats or lower.promotions.room < 1 or (place := lower.chain.where((name,))[0]) < 0:
            return False
        blocks = self._reserve(key)
        if not blocks:
            return False
        rows = _Rows(_content(key), blocks)
        payload = memoryview(bytearray(key.num_rows * key.row_bytes))

        def check(header: bytes) -> None:
            record = decode_header(header)
            verify(record, payload, rows.content, self._identity, None, lower.check_payload)
            at = 0
            for part in self._parts(rows):
                part[:] = payload[at : at + part.nbytes]
                at += part.nbytes
            rows.checksum = record.checksums[0]

        def landed(good: bool) -> None:
            if good:
                lower.demotions.known(name)
            else:
                self._shelf.discard(blocks, late=False)
            self._arrived(name, rows if good else None)

        self._coming[name] = []
        lower.promotions.begin(place, [Load(name, payload, check, landed)])
        return True

    def _used(self, name: bytes) -> None:
        demotions = self._lower.demotions
        if all(demotions.used((name,))):
            demotions.write((name,), lambda n: self._candidate(self._held[name]))

    def _candidate(self, rows: _Rows) -> Candidate:
        def make() -> StoreItem:
            payload = memoryview(b"".join(self._parts(rows)))
            record = Record(self._identity, None, rows.content, (rows.checksum,), payload.nbytes)
            return StoreItem(record.key, encode_header(record), payload)

        return Candidate(make, lambda: self._shelf.pin(rows.blocks), lambda: self._shelf.unpin(rows.blocks))


def _content(key: EmbeddingKey) -> EmbeddingRecord:
    return EmbeddingRecord(**structs.asdict(key))
