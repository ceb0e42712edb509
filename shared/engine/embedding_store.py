"""An encoder's side of the kv_store: embeddings that were encoded before, here or elsewhere, are brought back
instead of encoded again; what was encoded is offered.

Owns when the store is asked, and what becomes of its answers. A store that is slow, gone or of another mind
is a miss. Engine thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol

from shared.engine.desk import PullDesk
from shared.engine.inbox import Inbox
from shared.engine.observe import observe_pull
from shared.engine.tier_costs import TierCosts
from shared.errors import OutOfBlocks, TriptychError
from shared.kv_cache.block_pool import BlockPool
from shared.kv_cache.encoder_cache import EncoderCache
from shared.telemetry import metrics
from shared.tiering.embedding_pool import FoundEmbedding
from shared.tiering.nodes import NodeLease
from shared.transfer.handoff import BlockPull, PackedCheck, Pull, PullOutcome
from shared.types.store import EmbeddingKey
from shared.types.transfer import AgentInfo, BlockRef, EcTransferParams

#: The cache user that stands for what is coming from the store, and for what it is reading.
_STORE = "kv_store"
#: Offers under way; more are left out.
MAX_OFFERS = 64
_NO_SALT = hashlib.sha256(b"").digest()


class EmbeddingLink:
    """No store: nothing is found and nothing is kept. Base of the real link."""

    @property
    def holds_any(self) -> bool:
        """Whether it is a user of entries that it will give back."""
        return False

    def find(self, mm_hash: str, data: bytes, then: Callable[[bool], None]) -> None:
        """Bring the embeddings of this media into the cache, then call ``then`` (always, in the engine
        thread) with whether they are READY there; they stay at least until it returns. The cache has no
        entry."""
        then(False)

    def encoded(self, mm_hash: str, seconds: float) -> None:
        """The cache has this READY entry, for which it took so long. To be offered, in the background."""


class EmbeddingCalls(Protocol):
    """The stores' RPCs as calls that answer by callback, in any thread. ``usable``: any store answers."""

    @property
    def usable(self) -> bool: ...
    def lookup(
        self, key: EmbeddingKey, rows_per_block: int, done: Callable[[FoundEmbedding], None]
    ) -> None: ...
    def release(self, lease: NodeLease) -> None: ...
    def offer(self, key: EmbeddingKey, params: EcTransferParams, done: Callable[[], None]) -> None: ...


class EmbeddingFormat(Protocol):
    """What decides embeddings beside media and weights, and their shape."""

    processor_version: str
    decode_options: str
    row_bytes: int
    dtype: str
    rows_per_block: int

    def num_rows(self, data: bytes) -> int:
        """Rows that the media will have, by its header. Raises TriptychError."""
        ...


class RemoteEmbeddingLink(EmbeddingLink):
    """Talks to the kv_stores. An mm_hash covers the media's bytes, the processor and the tenant's salt."""

    def __init__(
        self,
        calls: EmbeddingCalls,
        cache: EncoderCache,
        pool: BlockPool,
        desk: PullDesk,
        inbox: Inbox,
        form: EmbeddingFormat,
        agent: Callable[[], AgentInfo],
        *,
        costs: TierCosts,
        deadline_s: float,
    ) -> None:
        self._calls = calls
        self._cache = cache
        self._pool = pool
        self._desk = desk
        self._inbox = inbox
        self._form = form
        self._agent = agent
        self._costs = costs
        self._deadline_s = deadline_s
        self._num_offers = 0

    @property
    def holds_any(self) -> bool:
        return self._num_offers > 0

    def find(self, mm_hash: str, data: bytes, then: Callable[[bool], None]) -> None:
        try:
            key = self._key(mm_hash, self._form.num_rows(data))
        except TriptychError:  # the preparer says what is wrong with it
            then(False)
            return
        if not (self._calls.usable and self._costs.prefers_loading(key.num_rows)):
            then(False)
            return
        metrics.EMBEDDING_STORE_QUERIES.inc()
        asked_at = self._costs.now()

        def answered(found: FoundEmbedding) -> None:
            seconds = self._costs.now() - asked_at
            self._inbox.post(lambda: self._found(mm_hash, key, found, seconds, then))

        self._calls.lookup(key, self._form.rows_per_block, answered)

    def encoded(self, mm_hash: str, seconds: float) -> None:
        entry = self._cache.acquire(mm_hash, _STORE)
        if entry is None:
            return
        self._costs.stepped(entry.num_rows, seconds)
        if not self._calls.usable or self._num_offers >= MAX_OFFERS:
            self._cache.release(mm_hash, _STORE)
            return
        self._num_offers += 1
        params = EcTransferParams(
            handoff_id=_STORE,
            producer=self._agent(),
            mm_hash=mm_hash,
            num_rows=entry.num_rows,
            row_bytes=self._form.row_bytes,
            dtype=self._form.dtype,
            block_ids=entry.block_ids,
            generations=tuple(self._pool.generation(block_id) for block_id in entry.block_ids),
            checksum=entry.checksum,
        )
        key = self._key(mm_hash, entry.num_rows)
        self._calls.offer(key, params, lambda: self._inbox.post(lambda: self._offered(mm_hash)))

    def _offered(self, mm_hash: str) -> None:
        self._num_offers -= 1
        self._cache.release(mm_hash, _STORE)

    def _key(self, mm_hash: str, num_rows: int) -> EmbeddingKey:
        form = self._form
        return EmbeddingKey(
            media_hash=hashlib.sha256(mm_hash.encode()).digest(),
            decode_options=form.decode_options,
            processor_version=form.processor_version,
            salt_digest=_NO_SALT,
            num_rows=num_rows,
            row_bytes=form.row_bytes,
            dtype=form.dtype,
        )

    def _found(
        self,
        mm_hash: str,
        key: EmbeddingKey,
        found: FoundEmbedding,
        lookup_s: float,
        then: Callable[[bool], None],
    ) -> None:
        params = found.params
        if params is None or not self._is_sound(key, params):
            self._give_back(found)
            then(False)
            return
        try:
            entry = self._cache.allocate(mm_hash, key.num_rows, _STORE)
        except OutOfBlocks:
            self._give_back(found)
            then(False)
            return
        remote = zip(params.block_ids, params.generations, entry.block_ids, strict=True)
        stale: list[int] = []

        def landed(outcome: PullOutcome) -> None:
            observe_pull("embedding", outcome)
            self._give_back(found)
            good = all(outcome.ok)
            if good:
                self._cache.commit(mm_hash, params.checksum)
                self._costs.loaded(key.num_rows, lookup_s + outcome.seconds)
                metrics.EMBEDDING_STORE_HITS.inc()
            else:
                stale.extend(self._cache.fail(mm_hash, quarantine=not outcome.terminal))
            then(good)
            self._cache.release(mm_hash, _STORE)

        pull = Pull(
            pull_id=self._desk.new_id(),
            producer=params.producer,
            region="ec",
            group=0,
            blocks=tuple(BlockPull(BlockRef(theirs, gen, ()), ours) for theirs, gen, ours in remote),
            checksum_heads=0,
            deadline_s=self._deadline_s,
            packed=PackedCheck(key.num_rows * key.row_bytes, params.checksum),
        )
        self._desk.pull(pull, landed, lambda: self._cache.release_quarantined(stale))

    def _is_sound(self, key: EmbeddingKey, params: EcTransferParams) -> bool:
        num_blocks = self._cache.num_blocks_for(key.num_rows)
        return (params.num_rows, params.row_bytes, params.dtype) == (
            key.num_rows,
            key.row_bytes,
            key.dtype,
        ) and len(params.block_ids) == len(params.generations) == num_blocks

    def _give_back(self, found: FoundEmbedding) -> None:
        if found.lease is not None:
            self._calls.release(found.lease)
