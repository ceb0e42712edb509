"""What the router tells workers and the command line: the port behind the wire's ControlService.

Owns the answer to announcements, and what is taken in from the registries. Who is alive is decided by the
workers' streams, and for stores by ``shared.routing.stores``, not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from shared.registry.base import Registry, RegistryUnavailable
from shared.routing.stores import KnownStores
from shared.routing.workers import WorkerPool
from shared.telemetry.logs import get_logger
from shared.types.worker import WorkerInfo, WorkerStatus

logger = get_logger(__name__)

#: A worker that has not taken its epoch on yet announces itself again so soon.
SOON_S = 0.05


class RouterControl:
    """``local`` counts epochs in this process; ``remote`` is the registry that routers share, the same
    object when there is none. A remote that fails is no news: serving goes on without it."""

    def __init__(
        self,
        workers: WorkerPool,
        stores: KnownStores,
        local: Registry,
        remote: Registry,
        heartbeat_s: float,
    ) -> None:
        self._workers = workers
        self._stores = stores
        self._local = local
        self._remote = remote
        self._heartbeat_s = heartbeat_s

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
        self._stores.announced(info)
        self._workers.announced(info)
        return epoch, self._heartbeat_s

    async def withdraw(self, worker_id: str, incarnation: str) -> None:
        """A worker leaves; unknown ones are ignored."""
        self._workers.withdrawn(worker_id, incarnation)
        self._stores.withdrawn(worker_id, incarnation)
        await self._local.withdraw(worker_id, incarnation)
        if self._remote is not self._local:
            with suppress(RegistryUnavailable):  # the entry expires by itself
                await self._remote.withdraw(worker_id, incarnation)

    async def poll(self) -> None:
        """Take in whom the shared registry lists: they announced themselves elsewhere. One that cannot be
        reached is no news."""
        try:
            infos = await self._remote.workers()
        except RegistryUnavailable:
            logger.warning("registry unavailable")
            return
        self._stores.registered(infos)
        for info in infos:
            self._workers.announced(info)

    def workers(self) -> Sequence[tuple[WorkerInfo, WorkerStatus | None]]:
        """The connected workers with their last status; stores as they announced themselves."""
        listed: list[tuple[WorkerInfo, WorkerStatus | None]] = [
            (worker.info, worker.status) for worker in self._workers.live()
        ]
        return listed + [(store, None) for store in self._stores.live()]
