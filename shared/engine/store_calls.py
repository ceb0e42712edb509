"""The kv_stores' RPCs, of blocks and of embeddings, made from the engine thread and answered by callback."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from shared.kv_cache.manager import CommittedBlock
from shared.kv_cache.segments import WantedBlock
from shared.tiering.embedding_pool import NOT_FOUND, EmbeddingPool, FoundEmbedding
from shared.tiering.membership import Membership
from shared.tiering.nodes import NodeLease, NodePool
from shared.tiering.pool import NO_HIT, PoolHit, StorePool
from shared.types.store import EmbeddingKey
from shared.types.transfer import AgentInfo, EcTransferParams

P = TypeVar("P", bound=NodePool[Any])


class PoolCalls(Generic[P]):
    """Calls of a pool that lives on ``event_loop``; ``membership`` keeps its nodes.

    The pool turns every failure into a miss; if even a call to it breaks, or is cancelled, the callback still
    comes, so that no request waits and no block stays pinned.
    """

    def __init__(self, pool: P, membership: Membership, event_loop: asyncio.AbstractEventLoop) -> None:
        self._pool = pool
        self._membership = membership
        self._event_loop = event_loop
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def usable(self) -> bool:
        """Whether any store would be asked now. Any thread."""
        return self._pool.usable

    async def close(self) -> None:
        """Cancel what is under way and close membership and pool."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._membership.close()
        await self._pool.close()

    def _run(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        def begin() -> None:
            task = self._event_loop.create_task(call())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._event_loop.call_soon_threadsafe(begin)


class RemoteStoreCalls(PoolCalls[StorePool]):
    """Implements ``store_link.StoreCalls``. ``agent`` gives our own agent as it is at the call."""

    def __init__(
        self,
        pool: StorePool,
        membership: Membership,
        agent: Callable[[], AgentInfo],
        event_loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(pool, membership, event_loop)
        self._agent = agent

    def lookup(self, wanted: tuple[WantedBlock, ...], tenant: str, done: Callable[[PoolHit], None]) -> None:
        async def call() -> None:
            hit = NO_HIT
            try:
                hit = await self._pool.lookup(wanted, tenant)
            finally:
                done(hit)

        self._run(call)

    def release(self, hit: PoolHit) -> None:
        async def call() -> None:
            await self._pool.release(hit.leases)

        self._run(call)

    def offer(self, blocks: tuple[CommittedBlock, ...], done: Callable[[int], None]) -> None:
        async def call() -> None:
            kept = 0
            try:
                kept = await self._pool.offer(self._agent(), blocks)
            finally:
                done(kept)

        self._run(call)


class RemoteEmbeddingCalls(PoolCalls[EmbeddingPool]):
    """Implements ``embedding_store.EmbeddingCalls``."""

    def lookup(self, key: EmbeddingKey, rows_per_block: int, done: Callable[[FoundEmbedding], None]) -> None:
        async def call() -> None:
            found = NOT_FOUND
            try:
                found = await self._pool.lookup(key, rows_per_block)
            finally:
                done(found)

        self._run(call)

    def release(self, lease: NodeLease) -> None:
        async def call() -> None:
            await self._pool.release(lease)

        self._run(call)

    def offer(self, key: EmbeddingKey, params: EcTransferParams, done: Callable[[], None]) -> None:
        async def call() -> None:
            try:
                await self._pool.offer(key, params)
            finally:
                done()

        self._run(call)
