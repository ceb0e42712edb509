"""Whose each request is, and for how long it may run without being asked after.

The router's lease on a request is the root of everything that is held for it here: when it ends, so do
the leases on its blocks. Owns that lease and the way of the request's events; not what the request does.
"""

from __future__ import annotations

from collections.abc import Iterable

from shared.clock import Clock
from shared.engine.inbox import Outbox
from shared.kv_cache.leases import LeaseTable
from shared.telemetry import metrics
from shared.types.worker import Failed, Released, RequestEvent


class Owners:
    """Engine thread only. Times in seconds: ``lease_s`` from one renewal to the end; ``grace_s`` what is left
    when the router's stream has ended, and what a request's own deadline is exceeded by before we act."""

    def __init__(self, outbox: Outbox, clock: Clock, lease_s: float, grace_s: float) -> None:
        self._outbox = outbox
        self._lease_s = lease_s
        self._grace_s = min(grace_s, lease_s)
        self._routers: dict[str, str] = {}
        self._leases = LeaseTable(clock, lease_s)
        self._deadlines = LeaseTable(clock, lease_s)

    def __len__(self) -> int:
        return len(self._routers)

    def begin(self, request_id: str, router_id: str, deadline_s: float | None = None) -> None:
        """``router_id`` starts a request that is not known here."""
        self._routers[request_id] = router_id
        self._leases.grant(request_id)
        metrics.LEASES_GRANTED.labels("request").inc()
        if deadline_s is not None:
            self._deadlines.grant(request_id, deadline_s + self._grace_s)

    def emit(self, event: RequestEvent) -> None:
        """Say something to the request's router. Its Released or Failed is the last thing said."""
        router_id = self._routers.get(event.request_id)
        if router_id is None:
            return
        self._outbox.emit(router_id, event)
        if isinstance(event, Released | Failed):
            del self._routers[event.request_id]
            self._leases.release(event.request_id)
            self._deadlines.release(event.request_id)

    def renew(self, request_ids: Iterable[str]) -> None:
        """Their router still wants them; unknown ones and those whose time is over are ignored."""
        for request_id in request_ids:
            if self._leases.holds(request_id):
                self._leases.grant(request_id)

    def orphaned(self, router_id: str) -> None:
        """This router's stream has ended: its requests have the grace that is left to a new one."""
        for request_id, owner in self._routers.items():
            if owner == router_id and self._leases.holds(request_id):
                self._leases.grant(request_id, self._grace_s)

    def expired(self) -> list[str]:
        """Requests to be aborted now: nobody has asked after them, or their own time is over."""
        over = self._leases.expired()
        metrics.LEASES_EXPIRED.labels("request").inc(len(over))
        return list(dict.fromkeys(over + self._deadlines.expired()))
