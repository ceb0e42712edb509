"""Prefixes pinned for a reader: a lease on the same leading blocks of every group's tier."""

from __future__ import annotations

from collections.abc import Sequence

from shared.clock import Clock, Entropy
from shared.kv_cache.leases import LeaseTable
from shared.tiering.base import Tier
from shared.types.store import BlockKey


class PrefixLeases:
    """Grants, ends and expires such leases; ``tiers`` are one a group. Single-threaded."""

    def __init__(self, tiers: Sequence[Tier], clock: Clock, entropy: Entropy, lease_s: float) -> None:
        self.lease_s = lease_s
        self._tiers = tiers
        self._entropy = entropy
        self._leases = LeaseTable(clock, lease_s)
        self._pinned: dict[str, tuple[list[int], ...]] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, keys: Sequence[BlockKey]) -> tuple[str, tuple[list[int], ...]]:
        """Pin the longest prefix of ``keys`` (of each group consecutive blocks, in order) that every
        group holds. Returns the lease's id, empty without a hit, and the block ids of each group."""
        found = [tier.lookup([k for k in keys if k.group == g]) for g, tier in enumerate(self._tiers)]
        num_blocks = min(len(ids) for ids in found)
        pinned = tuple(ids[:num_blocks] for ids in found)
        if not num_blocks:
            return "", pinned
        for tier, ids in zip(self._tiers, pinned, strict=True):
            tier.pin(ids)
        lease_id = self._entropy.hex_id()
        self._pinned[lease_id] = pinned
        self._leases.grant(lease_id)
        return lease_id, pinned

    def release(self, lease_ids: Sequence[str]) -> None:
        """End leases; unknown ones are ignored."""
        for lease_id in lease_ids:
            if self._leases.release(lease_id):
                self._unpin(lease_id)

    def expire(self) -> int:
        """End the leases whose time is over; returns how many."""
        expired = self._leases.expired()
        for lease_id in expired:
            self._unpin(lease_id)
        return len(expired)

    def _unpin(self, lease_id: str) -> None:
        for tier, ids in zip(self._tiers, self._pinned.pop(lease_id), strict=True):
            tier.unpin(ids)
