"""What the router tells workers and the command line: the port behind the wire's ControlService.

Owns the answer to announcements. Who is alive is decided by the workers' streams, not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from shared.registry.base import Registry, RegistryUnavailable
from shared.routing.workers import WorkerPool
from shared.telemetry.logs import get_logger
from shared.types.worker import WorkerInfo, WorkerStatus

logger = get_logger(__name__)

#: A worker that has not taken its epoch on yet announces itself again so soon.
SOON_S = 0.05


class RouterControl:
    """``local`` counts epochs in this process; ``remote`` is the registry that routers share, the same
    object when there is none. A remote that fails is no news: serving goes on without it."""

    def __init__(self, workers: WorkerPool, local: Registry, remote: Registry, heartbeat_s: float) -> None:
        self._workers = workers
        self._local = local
        self._remote = remote
        self._heartbeat_s = heartbeat_s
        self._stores: dict[str, WorkerInfo] = {}

    async def announce(self, info: WorkerInfo) -> tuple[int, float]:
        """A worker is alive. It is dialled once it carries the epoch that it was given, so that what it
        tells its peers about its memory is what they find there."""
        epoch = await self._local.announce(info)
        if self._remote is not self._local:
            try:
                epoch = max(epoch, await self._remote.announce(info))
            except RegistryUnavailable:
                logger.warning("registry unavailable")
        if info.agent.epoch < epoch:
            return epoch, SOON_S
        if info.kind == "kv_store":
            self._stores[info.worker_id] = info
        self._workers.announced(info)
        return epoch, self._heartbeat_s

    async def withdraw(self, worker_id: str, incarnation: str) -> None:
        """A worker leaves; unknown ones are ignored."""
        self._workers.withdrawn(worker_id, incarnation)
        store = self._stores.get(worker_id)
        if store is not None and store.incarnation == incarnation:
            del self._stores[worker_id]
        await self._local.withdraw(worker_id, incarnation)
        if self._remote is not self._local:
            with suppress(RegistryUnavailable):  # the entry expires by itself
                await self._remote.withdraw(worker_id, incarnation)

    def workers(self) -> Sequence[tuple[WorkerInfo, WorkerStatus | None]]:
        """The connected workers with their last status; stores as they announced themselves."""
        listed: list[tuple[WorkerInfo, WorkerStatus | None]] = [
            (worker.info, worker.status) for worker in self._workers.live()
        ]
        return listed + [(store, None) for store in self._stores.values()]
