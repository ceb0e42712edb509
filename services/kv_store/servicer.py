"""The store behind the wire: opens it for the first offer's identity and layout, or for the first look-up
that a lower tier can answer, and turns callbacks into answers. Event loop only; the wire itself is
``shared.rpc.kv_store``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from msgspec import structs

from shared.telemetry.logs import get_logger
from shared.tiering import embeddings, kv_store
from shared.tiering.embeddings import REGION, EmbeddingStore, RowFormat
from shared.tiering.kv_store import KvStore
from shared.tiering.lower import LowerTiers
from shared.tiering.record import record_key
from shared.types.identity import IdentityKey, LayoutSpec
from shared.types.store import BlockKey, EmbeddingHit, EmbeddingKey, OfferedBlock, StoreHit
from shared.types.transfer import AgentInfo, EcTransferParams
from shared.types.worker import WorkerInfo, WorkerStatus

_log = get_logger(__name__)
T = TypeVar("T")

UPKEEP_S = 60.0


class Opener(Protocol):
    """Makes the stores' memory, once each."""

    def kv(self, identity: IdentityKey, layout: LayoutSpec) -> KvStore: ...
    def embeddings(self, identity: IdentityKey, rows: RowFormat) -> EmbeddingStore | None: ...
    def agent(self) -> AgentInfo: ...
    def set_epoch(self, epoch: int) -> None: ...
    def close(self) -> None: ...


class StoreService:
    """The process's one store (a KvStorePort). ``accepts`` says whose KV it may keep; the first who is
    accepted decides the exact identity and layout for the life of the process, and any other is a miss from
    then on. Embeddings have their own first.
    """

    def __init__(
        self,
        base: WorkerInfo,
        accepts: Callable[[IdentityKey, LayoutSpec | None], bool],
        opener: Opener,
        lower: LowerTiers,
    ) -> None:
        """``base`` is the announcement before the store is open."""
        self._base = base
        self._accepts = accepts
        self._opener = opener
        self._lower = lower
        self._kv: tuple[IdentityKey, KvStore] | None = None
        self._ec: tuple[IdentityKey, EmbeddingStore] | None = None
        self.address = base.address
        lower.chain.on_news = self._on_news

    async def offer(self, identity: IdentityKey, producer: AgentInfo, blocks: Sequence[OfferedBlock]) -> int:
        if self._kv is None and producer.layout is not None and self._accepts(identity, producer.layout):
            self._open(identity, producer.layout)
        if self._kv is None or identity != self._kv[0]:
            _log.warning("an offer of another identity was refused", worker=producer.worker_id)
            return 0
        store = self._kv[1]
        return await _answer(lambda done: store.offer(producer, blocks, done))

    async def lookup(
        self, identity: IdentityKey, layout: LayoutSpec, blocks: Sequence[BlockKey], tenant: str = ""
    ) -> StoreHit:
        if self._kv is None and blocks and self._accepts(identity, layout):
            # A hash covers the identity and a record's key the layout: what is found is of this very kind.
            key = record_key("kv", _stored(layout), blocks[0].group, blocks[0].block_hash)
            if self._lower.chain.where((key,))[0] >= 0:
                self._open(identity, layout)
        if self._kv is None or identity != self._kv[0]:
            return kv_store.MISS
        store = self._kv[1]
        return await _answer(lambda done: store.lookup(layout, blocks, done, tenant))

    def _open(self, identity: IdentityKey, layout: LayoutSpec) -> None:
        self._kv = identity, self._opener.kv(identity, _stored(layout))
        _log.info("the store is open", blocks=self._kv[1].num_blocks)

    async def offer_embedding(
        self, identity: IdentityKey, key: EmbeddingKey, params: EcTransferParams
    ) -> bool:
        extents = {region.name: region.extent_bytes for region in params.producer.regions}.get(REGION)
        num_rows = extents[0] // key.row_bytes if extents else 0
        store = self._embeddings(identity, RowFormat(num_rows, key.row_bytes, key.dtype))
        return store is not None and await _answer(lambda done: store.offer(key, params, done))

    async def lookup_embedding(
        self, identity: IdentityKey, key: EmbeddingKey, rows_per_block: int
    ) -> EmbeddingHit:
        rows = RowFormat(rows_per_block, key.row_bytes, key.dtype)
        wanted = self._ec is not None or self._lower.chain.holds_anything
        store = self._embeddings(identity, rows) if wanted else None
        if store is None or store.rows != rows:
            return embeddings.MISS
        return await _answer(lambda done: store.lookup(key, done))

    def _embeddings(self, identity: IdentityKey, rows: RowFormat) -> EmbeddingStore | None:
        """The store for these, opened if it is not; None for those of another model."""
        if self._ec is None and rows.rows_per_block > 0 and self._accepts(identity, None):
            opened = self._opener.embeddings(identity, rows)
            self._ec = None if opened is None else (identity, opened)
        return self._ec[1] if self._ec is not None and self._ec[0] == identity else None

    def release(self, lease_ids: Sequence[str]) -> None:
        for store in self._stores():
            store.release(lease_ids)

    def info(self) -> WorkerInfo:
        identity = self._base.identity if self._kv is None else self._kv[0]
        return structs.replace(
            self._base, address=self.address, identity=identity, agent=self._opener.agent()
        )

    def status(self) -> WorkerStatus:
        stores = self._stores()
        num_blocks, num_free = sum(s.num_blocks for s in stores), sum(s.num_free for s in stores)
        num_quarantined, kv = sum(s.num_quarantined for s in stores), self._kv[1] if self._kv else None
        return WorkerStatus(
            self._base.incarnation,
            num_blocks=num_blocks,
            num_blocks_free=num_free,
            num_blocks_quarantined=num_quarantined,
            num_blocks_held=num_blocks - num_free - num_quarantined,
            num_leases=sum(s.num_leases for s in stores),
            num_cached_tokens=kv.num_held // len(kv.layout.groups) * kv.layout.block_size if kv else 0,
        )

    def _stores(self) -> list[KvStore | EmbeddingStore]:
        return [opened[1] for opened in (self._kv, self._ec) if opened is not None]

    def set_epoch(self, epoch: int) -> None:
        """A router gave a new epoch; references of an older one are void."""
        self._opener.set_epoch(epoch)

    async def watch(self, period_s: float) -> None:
        """End leases in time and look after lower tiers; runs until cancelled."""
        due_s = UPKEEP_S
        while True:
            await asyncio.sleep(period_s)
            for store in self._stores():
                store.expire()
            due_s -= period_s
            if due_s <= 0:
                due_s = UPKEEP_S
                for task in self._lower.upkeep:
                    task()

    def _on_news(self) -> None:
        if self._kv is not None:
            self._kv[1].news()


def _stored(layout: LayoutSpec) -> LayoutSpec:
    """How the store keeps blocks of this layout: whole, however many ranks share a worker's heads."""
    return structs.replace(layout, tp_size=1, head_start=0)


async def _answer(call: Callable[[Callable[[T], None]], None]) -> T:
    """What a call answers by callback."""
    answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def done(value: T) -> None:
        if not answer.done():  # the caller may have gone
            answer.set_result(value)

    call(done)
    return await answer
