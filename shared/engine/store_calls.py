"""The kv_stores' RPCs, made from the engine thread and answered by callback."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from shared.kv_cache.manager import CommittedBlock
from shared.kv_cache.segments import WantedBlock
from shared.tiering.membership import Membership
from shared.tiering.pool import NO_HIT, PoolHit, StorePool
from shared.types.transfer import AgentInfo


class RemoteStoreCalls:
    """Implements ``shared.engine.store_link.StoreCalls`` over a pool that lives on ``event_loop``.

    ``agent`` gives our own agent as it is at the call; ``membership`` keeps the pool's nodes. The pool turns
    every failure into a miss; if even a call to it breaks, the callback still comes, so that no request waits
    and no block stays pinned.
    """

    def __init__(
        self,
        pool: StorePool,
        membership: Membership,
        agent: Callable[[], AgentInfo],
        event_loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._pool = pool
        self._membership = membership
        self._agent = agent
        self._event_loop = event_loop
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def usable(self) -> bool:
        return self._pool.usable

    def lookup(self, wanted: tuple[WantedBlock, ...], done: Callable[[PoolHit], None]) -> None:
        async def call() -> None:
            hit = NO_HIT
            try:
                hit = await self._pool.lookup(wanted)
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

    async def close(self) -> None:
        """Cancel what is under way and close membership and pool."""
        for task in tuple(self._tasks):
            task.cancel()
        await self._membership.close()
        await self._pool.close()

    def _run(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        def begin() -> None:
            task = self._event_loop.create_task(call())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._event_loop.call_soon_threadsafe(begin)
