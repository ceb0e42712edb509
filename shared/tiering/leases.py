"""Prefixes pinned for a reader: a lease on the same leading blocks of every group's tier."""

from __future__ import annotations

from collections.abc import Sequence

from shared.clock import Clock, Entropy
from shared.kv_cache.leases import LeaseTable
from shared.tiering.base import Tier
from shared.types.store import BlockKey

#: What is pinned: block ids, one list a group.
Pinned = tuple[list[int], ...]


class PrefixLeases:
    """Grants, ends and expires such leases; ``tiers`` are one a group. Single-threaded."""

    def __init__(self, tiers: Sequence[Tier], clock: Clock, entropy: Entropy, lease_s: float) -> None:
        self.lease_s = lease_s
        self._tiers = tiers
        self._entropy = entropy
        self._leases = LeaseTable(clock, lease_s)
        self._pinned: dict[str, Pinned] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def grouped(self, keys: Sequence[BlockKey]) -> list[list[BlockKey]]:
        """The keys of each group, in order; those of no group here are left out."""
        return [[key for key in keys if key.group == group] for group in range(len(self._tiers))]

    def find(self, groups: Sequence[Sequence[BlockKey]]) -> Pinned:
        """The longest prefix of every group's keys that every group holds. Pins nothing."""
        found = [tier.lookup(keys) for tier, keys in zip(self._tiers, groups, strict=True)]
        num_blocks = min(map(len, found))
        return tuple(ids[:num_blocks] for ids in found)

    def grant(self, keys: Sequence[BlockKey]) -> tuple[str, Pinned]:
        """Pin the longest prefix of ``keys`` (of each group consecutive blocks, in order) that every
        group holds. Returns the lease's id, empty without a hit, and the block ids of each group."""
        groups = self.grouped(keys)
        found = self.find(groups)
        return self.pin(groups, found), found

    def pin(self, groups: Sequence[Sequence[BlockKey]], found: Pinned) -> str:
        """A lease on what ``find`` found, if that is anything, with nothing reserved since; it was used."""
        if not found[0]:
            return ""
        for tier, keys, ids in zip(self._tiers, groups, found, strict=True):
            tier.pin(ids)
            tier.use(keys[: len(ids)])
        lease_id = self._entropy.hex_id()
        self._pinned[lease_id] = found
        self._leases.grant(lease_id)
        return lease_id

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
