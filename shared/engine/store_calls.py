"""The kv_store's RPCs, made from the engine thread and answered by callback."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from shared.kv_cache.block_hash import HashedBlock
from shared.kv_cache.manager import CommittedBlock
from shared.tiering.remote import MISS, KvStoreClient
from shared.types.store import StoreHit
from shared.types.transfer import AgentInfo


class RemoteStoreCalls:
    """Implements ``shared.engine.store_link.StoreCalls`` over a client that lives on ``event_loop``.

    ``agent`` gives our own agent as it is at the call. The client turns every failure into a miss; if
    even a call to it breaks, the callback still comes, so that no request waits and no block stays pinned.
    """

    def __init__(
        self, client: KvStoreClient, agent: Callable[[], AgentInfo], event_loop: asyncio.AbstractEventLoop
    ) -> None:
        self._client = client
        self._agent = agent
        self._event_loop = event_loop
        self._tasks: set[asyncio.Task[None]] = set()

    def lookup(self, wanted: tuple[HashedBlock, ...], done: Callable[[StoreHit], None]) -> None:
        async def call() -> None:
            hit = MISS
            try:
                hit = await self._client.lookup(wanted)
            finally:
                done(hit)

        self._run(call)

    def release(self, lease_id: str) -> None:
        async def call() -> None:
            await self._client.release((lease_id,))

        self._run(call)

    def offer(self, blocks: tuple[CommittedBlock, ...], done: Callable[[int], None]) -> None:
        async def call() -> None:
            kept = 0
            try:
                kept = await self._client.offer(self._agent(), blocks)
            finally:
                done(kept)

        self._run(call)

    async def close(self) -> None:
        """Cancel what is under way and close the client."""
        for task in tuple(self._tasks):
            task.cancel()
        await self._client.close()

    def _run(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        def begin() -> None:
            task = self._event_loop.create_task(call())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._event_loop.call_soon_threadsafe(begin)
