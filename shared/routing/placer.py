"""Places requests: the pure policy, fed with what the router remembers about caches.

Owns that memory. It sends nothing and holds no connection.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.routing.affinity import MediaIndex, PrefixIndex
from shared.routing.policy import Costs, Demand, MediaDemand, Placement, WorkerView, place
from shared.types.request import GenerationRequest


class Placer:
    """Picks the workers of one attempt at a time and remembers what they will then hold."""

    def __init__(self, costs: Costs | None = None) -> None:
        self._costs = costs
        self._computed = PrefixIndex()
        self._received = PrefixIndex()
        self._encoded = MediaIndex()
        self._lives: dict[str, str] = {}

    def place(
        self, workers: Sequence[WorkerView], request: GenerationRequest, avoid: frozenset[str] = frozenset()
    ) -> Placement | None:
        """The workers for ``request``, or None when these cannot serve it now. ``avoid``: keys of
        workers that are taken only when nothing else is left."""
        if not workers:
            return None
        chain = self._computed.chain(request.token_ids, request.media, request.cache_salt)
        sizes = {item.mm_hash: item.num_tokens for item in request.media}
        demand = Demand(
            request.model,
            len(request.token_ids),
            tuple(MediaDemand(h, size, self._encoded.holder(h)) for h, size in sizes.items()),
            {**self._received.match(chain), **self._computed.match(chain)},
            avoid,
        )
        placement = place(workers, demand, self._costs)
        if placement is not None:
            self._computed.record(chain, placement.prefill or placement.decode)
            if placement.prefill:
                self._received.record(chain, placement.decode)
            for key, hashes in placement.encoders:
                for mm_hash in hashes:
                    self._encoded.record(mm_hash, key)
        return placement

    def started(self, worker_id: str, key: str, recalled: bool) -> None:
        """A new life of a worker; ``recalled``: it has found the blocks of the one before again."""
        before, self._lives[worker_id] = self._lives.get(worker_id, key), key
        if recalled and before != key:
            self._computed.renamed(before, key)
            self._received.renamed(before, key)
