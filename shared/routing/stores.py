"""The kv_stores that a router knows: it does not route to them, but tells workers where they are.

Owns who is listed. A store is known because it announced itself here lately, or because the registry that
routers share listed it when it last answered. Nobody is forgotten because that registry is silent.
Event loop only.
"""

from __future__ import annotations

from collections.abc import Iterable

from shared.clock import Clock
from shared.types.worker import WorkerInfo

KIND = "kv_store"


class KnownStores:
    """A store's own announcement counts for ``ttl_s``, the registry's list until its next.."""

    def __init__(self, clock: Clock, ttl_s: float) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        #: Worker id -> (expiry, info).
        self._announced: dict[str, tuple[float, WorkerInfo]] = {}
        self._registered: dict[str, WorkerInfo] = {}

    def announced(self, info: WorkerInfo) -> None:
        """A worker says that it is there; no matter if it is no store, or an incarnation that is over."""
        if info.kind == KIND and not self._is_over(info):
            self._announced[info.worker_id] = (self._clock.now() + self._ttl_s, info)

    def registered(self, infos: Iterable[WorkerInfo]) -> None:
        """These, and no others, are listed in the registry."""
        self._registered = {info.worker_id: info for info in infos if info.kind == KIND}

    def withdrawn(self, worker_id: str, incarnation: str) -> None:
        """A worker says goodbye; unknown ones are ignored."""
        _, announced = self._announced.get(worker_id, (0.0, None))
        if announced is not None and announced.incarnation == incarnation:
            del self._announced[worker_id]
        registered = self._registered.get(worker_id)
        if registered is not None and registered.incarnation == incarnation:
            del self._registered[worker_id]

    def live(self) -> list[WorkerInfo]:
        """By worker id; of each its newest incarnation."""
        now = self._clock.now()
        self._announced = {key: entry for key, entry in self._announced.items() if entry[0] > now}
        found = dict(self._registered)
        for worker_id, (_, info) in self._announced.items():
            registered = found.get(worker_id)
            if registered is None or registered.agent.epoch <= info.agent.epoch:
                found[worker_id] = info
        return [found[worker_id] for worker_id in sorted(found)]

    def _is_over(self, info: WorkerInfo) -> bool:
        _, known = self._announced.get(info.worker_id, (0.0, info))
        return known.agent.epoch > info.agent.epoch
