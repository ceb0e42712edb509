"""The store behind the wire: opens it for the first offer's identity and layout, and turns callbacks
into answers. Event loop only; the wire itself is ``shared.rpc.kv_store``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import structs

from services.kv_store.store import MISS, KvStore
from shared.telemetry.logs import get_logger
from shared.types.identity import IdentityKey, LayoutSpec
from shared.types.store import BlockKey, OfferedBlock, StoreHit
from shared.types.transfer import AgentInfo
from shared.types.worker import WorkerInfo, WorkerStatus

_log = get_logger(__name__)


class OpenStore(Protocol):
    """A store with its memory and transfer."""

    store: KvStore

    def info(self) -> AgentInfo: ...
    def set_epoch(self, epoch: int) -> None: ...
    def close(self) -> None: ...


class StoreService:
    """The process's one store (a KvStorePort). ``accepts`` says whose KV it may keep; the first offer
    that is accepted decides the exact identity and layout for the life of the process, and any other is
    a miss from then on.
    """

    def __init__(
        self,
        base: WorkerInfo,
        accepts: Callable[[IdentityKey, LayoutSpec], bool],
        open_store: Callable[[LayoutSpec, int], OpenStore],
    ) -> None:
        """``base`` is the announcement before the store is open; ``open_store`` gets layout and epoch."""
        self._base = base
        self._accepts = accepts
        self._open_store = open_store
        self._identity = base.identity
        self._open: OpenStore | None = None
        self._epoch = 0
        self.address = base.address

    async def offer(self, identity: IdentityKey, producer: AgentInfo, blocks: Sequence[OfferedBlock]) -> int:
        if self._open is None and producer.layout is not None and self._accepts(identity, producer.layout):
            self._identity = identity
            self._open = self._open_store(producer.layout, self._epoch)
            _log.info("the store is open", blocks=self._open.store.num_blocks)
        if self._open is None or identity != self._identity:
            _log.warning("an offer of another identity was refused", worker=producer.worker_id)
            return 0
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def done(num_kept: int) -> None:
            if not answer.done():  # the caller may have gone
                answer.set_result(num_kept)

        self._open.store.offer(producer, blocks, done)
        return await answer

    async def lookup(self, identity: IdentityKey, layout: LayoutSpec, blocks: Sequence[BlockKey]) -> StoreHit:
        if self._open is None or identity != self._identity:
            return MISS
        return self._open.store.lookup(layout, blocks)

    def release(self, lease_ids: Sequence[str]) -> None:
        if self._open is not None:
            self._open.store.release(lease_ids)

    def info(self) -> WorkerInfo:
        opened = self._open
        agent = structs.replace(self._base.agent, epoch=self._epoch) if opened is None else opened.info()
        return structs.replace(self._base, address=self.address, identity=self._identity, agent=agent)

    def status(self) -> WorkerStatus:
        if self._open is None:
            return WorkerStatus(self._base.incarnation)
        store = self._open.store
        return WorkerStatus(
            self._base.incarnation,
            num_blocks=store.num_blocks,
            num_blocks_free=store.num_free,
            num_blocks_quarantined=store.num_quarantined,
            num_blocks_held=store.num_blocks - store.num_free - store.num_quarantined,
            num_leases=store.num_leases,
            num_cached_tokens=store.num_held // len(store.layout.groups) * store.layout.block_size,
        )

    def set_epoch(self, epoch: int) -> None:
        """A router gave a new epoch; references of an older one are void."""
        self._epoch = epoch
        if self._open is not None:
            self._open.set_epoch(epoch)

    async def watch(self, period_s: float) -> None:
        """End leases in time; runs until cancelled."""
        while True:
            await asyncio.sleep(period_s)
            if self._open is not None:
                self._open.store.expire()

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
