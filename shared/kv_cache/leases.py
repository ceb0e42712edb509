"""Leases: promises to hold something for a while. Owns deadlines; not what is held.

Judged by the injected monotonic clock alone. Single-threaded.
"""

from __future__ import annotations

from shared.clock import Clock


class LeaseTable:
    """Each lease leaves the table exactly once: by ``release`` or by ``expired``.

    So whoever gets the id from either of them frees what the lease held, and nobody frees it twice.
    """

    def __init__(self, clock: Clock, ttl_s: float) -> None:
        if ttl_s <= 0:
            raise ValueError("ttl_s must be positive")
        self._clock = clock
        self._ttl_s = ttl_s
        self._leases: dict[str, tuple[float, float]] = {}  # id -> (deadline, ttl)
        # No deadline lies before this instant: ``expired`` is asked at every step and mostly has nothing.
        self._earliest = float("inf")

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, lease_id: str, ttl_s: float | None = None) -> None:
        """Start a lease of ``ttl_s`` seconds (default: the table's). A lease that exists starts anew."""
        ttl_s = self._ttl_s if ttl_s is None else ttl_s
        if ttl_s <= 0:
            raise ValueError("ttl_s must be positive")
        deadline = self._clock.now() + ttl_s
        self._leases[lease_id] = (deadline, ttl_s)
        self._earliest = min(self._earliest, deadline)

    def holds(self, lease_id: str) -> bool:
        """Whether the lease exists and its time is not over."""
        lease = self._leases.get(lease_id)
        return lease is not None and self._clock.now() < lease[0]

    def renew(self, lease_id: str) -> bool:
        """Start the lease's own time anew. False when it is unknown or over: then nothing changes."""
        if not self.holds(lease_id):
            return False
        _, ttl_s = self._leases[lease_id]
        self._leases[lease_id] = (self._clock.now() + ttl_s, ttl_s)
        return True

    def release(self, lease_id: str) -> bool:
        """End a lease; True when this call took it out of the table (also when its time was over)."""
        return self._leases.pop(lease_id, None) is not None

    def expired(self) -> list[str]:
        """Take out every lease whose time is over, oldest grant first."""
        now = self._clock.now()
        if now < self._earliest:
            return []
        over = [lease_id for lease_id, (deadline, _) in self._leases.items() if deadline <= now]
        for lease_id in over:
            del self._leases[lease_id]
        self._earliest = min((deadline for deadline, _ in self._leases.values()), default=float("inf"))
        return over
