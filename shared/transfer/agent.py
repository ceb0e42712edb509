"""The transfer agent of a process: its backends, its arenas, and its links to peers.

A link is one connection over the backend that was found by probe: the configured order is tried and
the first that can really read the peer is kept. Owns connections; not pulls (``puller``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from shared.clock import Clock
from shared.errors import ConfigError, PeerLost, TransferError
from shared.telemetry.logs import get_logger
from shared.transfer.arena import Arena
from shared.transfer.base import Pieces, TransferBackend
from shared.transfer.handoff import SCRATCH, SCRATCH_BYTES
from shared.transfer.reslice import STAGE
from shared.types.identity import LayoutSpec
from shared.types.transfer import AgentInfo, Endpoint, RegionInfo

_log = get_logger(__name__)

#: Pulls that can be under way at a time; more wait.
NUM_SLOTS = 256
#: A peer that could not be reached is not tried again for so long; an unused link is kept so long.
_RETRY_S = 1.0
_IDLE_S = 60.0


def _blocks(info: RegionInfo) -> tuple[Pieces, ...]:
    """The blocks of each group, as what reads will mostly ask for."""
    return tuple(map(Pieces, info.data_offsets, info.extent_bytes, info.num_blocks))


class TransferAgent:
    """Registers the arenas, and one for scratch, with every backend. ``order`` names the backends in
    order of preference. Until a ``Puller`` takes it over, one thread; ``info`` from any. Raises ConfigError
    when ``order`` names a backend that is not given.
    """

    def __init__(
        self,
        worker_id: str,
        incarnation: str,
        backends: Sequence[TransferBackend],
        arenas: Mapping[str, Arena],
        order: Sequence[str],
    ) -> None:
        by_name = {backend.name: backend for backend in backends}
        if missing := [name for name in order if name not in by_name]:
            raise ConfigError(f"no such transfer backend here: {', '.join(missing)}")
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.backends = tuple(by_name[name] for name in order)
        self.arenas = dict(arenas)
        self.scratch = Arena.create(SCRATCH, (NUM_SLOTS,), (SCRATCH_BYTES,), incarnation)
        for backend in self.backends:
            for arena in (*self.arenas.values(), self.scratch):
                backend.register(arena.info.name, arena.buffer, arena.fd, _blocks(arena.info))
        self._endpoints = tuple(Endpoint(b.name, b.describe()) for b in self.backends)

    def info(self, layout: LayoutSpec | None = None) -> AgentInfo:
        """What peers need; carries the epoch as it is now."""
        return AgentInfo(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            epoch=max((arena.epoch for arena in self.arenas.values()), default=0),
            endpoints=self._endpoints,
            regions=tuple(arena.info for name, arena in self.arenas.items() if name != STAGE),
            layout=layout,
        )

    def set_epoch(self, epoch: int) -> None:
        """Fence every arena; ``info`` carries the new epoch from now on."""
        for arena in self.arenas.values():
            arena.set_epoch(epoch)

    def close(self) -> None:
        """Close the backends and the scratch; the arenas are their owner's. Close the puller first."""
        for backend in self.backends:
            backend.close()
        self.scratch.close()


class Link:
    """An open connection to one incarnation of a worker."""

    def __init__(self, producer: AgentInfo, backend: TransferBackend, peer: Any, now: float) -> None:
        self.worker_id = producer.worker_id
        self.incarnation = producer.incarnation
        self.epoch = producer.epoch
        self.backend = backend
        self.peer = peer
        self.used_at = now


class Links:
    """At most one link a worker: a newer incarnation displaces an older one. Puller's thread only.

    ``dropped`` is called with each link right after it was torn down.
    """

    def __init__(
        self, backends: Iterable[TransferBackend], clock: Clock, dropped: Callable[[Link], None]
    ) -> None:
        self._backends = {backend.name: backend for backend in backends}
        self._clock = clock
        self._dropped = dropped
        self._links: dict[str, Link] = {}
        self._unreachable: dict[tuple[str, str], float] = {}

    def get(self, producer: AgentInfo) -> Link:
        """The link to this very incarnation, made when there is none. Raises PeerLost."""
        now = self._clock.now()
        link = self._links.get(producer.worker_id)
        if link is not None and link.incarnation == producer.incarnation:
            link.used_at = now
            link.epoch = max(link.epoch, producer.epoch)
            return link
        if link is not None and producer.epoch < link.epoch:
            raise PeerLost(f"{producer.worker_id} has started anew since")
        key = (producer.worker_id, producer.incarnation)
        if now < self._unreachable.get(key, now):
            raise PeerLost(f"{producer.worker_id} was not reachable a moment ago")
        try:
            made = self._connect(producer, now)
        except PeerLost:
            self._unreachable[key] = now + _RETRY_S
            raise
        if link is not None:
            self.drop(link)
        self._links[producer.worker_id] = made
        return made

    def _connect(self, producer: AgentInfo, now: float) -> Link:
        name = f"{producer.worker_id}@{producer.incarnation}"
        metadata = {endpoint.backend: endpoint.metadata for endpoint in producer.endpoints}
        for backend in self._backends.values():
            if backend.name not in metadata:
                continue
            try:
                peer = backend.connect(name, metadata[backend.name])
            except TransferError as error:
                _log.debug(
                    "a transfer backend does not serve",
                    peer=name,
                    backend=backend.name,
                    problem=error.message,
                )
                continue
            _log.info("linked to a peer", peer=name, backend=backend.name)
            return Link(producer, backend, peer, now)
        raise PeerLost(f"{producer.worker_id} cannot be reached by any transfer backend")

    def drop(self, link: Link) -> None:
        """Tear a link down; afterwards nothing of it can land. Dropped ones are ignored."""
        if self._links.get(link.worker_id) is not link:
            return
        del self._links[link.worker_id]
        link.backend.disconnect(link.peer)
        self._dropped(link)

    def drop_idle(self, in_use: Callable[[Link], bool]) -> None:
        """Drop links unused for a while: they may hold memory of a peer that is dead."""
        now = self._clock.now()
        for link in tuple(self._links.values()):
            if now - link.used_at > _IDLE_S and not in_use(link):
                self.drop(link)
        for key in [key for key, until in self._unreachable.items() if until <= now]:
            del self._unreachable[key]

    def drop_all(self) -> None:
        for link in tuple(self._links.values()):
            self.drop(link)
