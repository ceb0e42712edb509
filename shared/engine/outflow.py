"""The producer's side of a handoff: what a prefill worker announces, holds and gives back.

Blocks of a finished prompt stay in the pool under a lease. They are given back by the reader's
verified-commit, by an Abort, or - the backstop - when the lease ends.
"""

from __future__ import annotations

from collections.abc import Callable

from shared.engine.live import LiveRequest
from shared.failpoints import Failpoints
from shared.kv_cache.leases import LeaseTable
from shared.kv_cache.manager import KVCacheManager
from shared.telemetry import metrics
from shared.types.worker import BlocksCommitted, HandoffReady, Released, RequestEvent


class Outflow:
    """Held handoffs of one worker. Engine thread only."""

    def __init__(
        self,
        kv: KVCacheManager,
        leases: LeaseTable,
        emit: Callable[[RequestEvent], None],
        failpoints: Failpoints,
    ) -> None:
        self._kv = kv
        self._leases = leases
        self._emit = emit
        self._failpoints = failpoints
        self._held: dict[str, LiveRequest] = {}

    @property
    def num_held(self) -> int:
        return len(self._held)

    def announce(self, live: LiveRequest, num_blocks: int) -> None:
        """Tell the router of committed blocks up to ``num_blocks`` that it was not told of yet."""
        count = num_blocks - live.num_announced
        if count <= 0:
            return
        self._failpoints.hit("prefill.commit")
        for group in range(len(self._kv.spec.groups)):
            refs = self._kv.committed(live.parent.key, group, live.num_announced, count)
            self._emit(
                BlocksCommitted(live.request_id, live.handoff_id, group, live.num_announced, tuple(refs))
            )
        live.num_announced = num_blocks

    def ready(self, live: LiveRequest) -> None:
        """All blocks are announced: hold them under a lease from now on."""
        live.held = True
        self._held[live.handoff_id] = live
        self._leases.grant(live.handoff_id)
        metrics.LEASES_GRANTED.labels("kv").inc()
        self._emit(
            HandoffReady(
                live.request_id,
                live.handoff_id,
                num_blocks=live.num_announced,
                num_cached_tokens=live.parent.num_cached,
            )
        )

    def verified(self, handoff_id: str) -> LiveRequest | None:
        """The reader has verified and committed: give the blocks back. None if not held (any more)."""
        self._leases.release(handoff_id)
        return self._release(handoff_id)

    def expire(self) -> list[LiveRequest]:
        """Give back what nobody fetched in time: a normal outcome with a metric."""
        expired = []
        for handoff_id in self._leases.expired():
            live = self._release(handoff_id)
            if live is not None:
                metrics.LEASES_EXPIRED.labels("kv").inc()
                expired.append(live)
        return expired

    def renew(self, handoff_id: str) -> bool:
        """Extend a lease; False when it is not held here."""
        return self._leases.renew(handoff_id)

    def _release(self, handoff_id: str) -> LiveRequest | None:
        live = self._held.pop(handoff_id, None)
        if live is None:
            return None
        self._failpoints.hit("free.before_release")
        parent = live.parent
        if parent.kv_open:
            self._kv.close(parent.key)
            parent.kv_open = False
        self._emit(Released(live.request_id))
        return live
