"""A registry inside one process: enough when workers announce themselves to each router."""

from __future__ import annotations

from collections import OrderedDict

from shared.clock import Clock
from shared.registry.base import Registry
from shared.types.worker import WorkerInfo

#: Earlier incarnations that are remembered for each worker id, so that they stay fenced.
MAX_INCARNATIONS = 32


class MemoryRegistry(Registry):
    """Entries expire by the injected clock."""

    def __init__(self, clock: Clock, ttl_s: float) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        #: worker id -> incarnation -> epoch, oldest first.
        self._epochs: dict[str, OrderedDict[str, int]] = {}
        #: worker id -> (expiry, info)
        self._entries: dict[str, tuple[float, WorkerInfo]] = {}

    async def announce(self, info: WorkerInfo) -> int:
        epochs = self._epochs.setdefault(info.worker_id, OrderedDict())
        newest = max(epochs.values(), default=0)
        epoch = epochs.get(info.incarnation)
        if epoch is None:
            epoch = newest = max(newest + 1, info.agent.epoch)
            epochs[info.incarnation] = epoch
            if len(epochs) > MAX_INCARNATIONS:
                epochs.popitem(last=False)
        if epoch == newest:
            self._entries[info.worker_id] = (self._clock.now() + self._ttl_s, info)
        return epoch

    async def withdraw(self, worker_id: str, incarnation: str) -> None:
        entry = self._entries.get(worker_id)
        if entry is not None and entry[1].incarnation == incarnation:
            del self._entries[worker_id]

    async def workers(self) -> list[WorkerInfo]:
        now = self._clock.now()
        self._entries = {key: entry for key, entry in self._entries.items() if entry[0] > now}
        return [self._entries[key][1] for key in sorted(self._entries)]

    async def close(self) -> None:
        self._entries.clear()
