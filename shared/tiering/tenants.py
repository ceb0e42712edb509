"""Shares of a tier's blocks: how much each tenant holds, and what it gives up first.

Owns counts and one order of use a tenant; not the blocks. Keys without a tenant (empty) belong to all and
count for nobody. Single-threaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from shared.tiering.eviction import LRU


class TenantShares:
    """Each tenant may hold ``limit`` blocks as long as others want room, too."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: Counter[str] = Counter()
        self._heavy: set[str] = set()
        self._orders: dict[str, LRU[bytes]] = {}

    def num_held(self, tenant: str) -> int:
        return self._held[tenant]

    def excess(self, tenant: str, num_more: int) -> int:
        """Blocks of ``num_more`` that would be beyond the tenant's share."""
        return min(num_more, max(0, self._held[tenant] + num_more - self._limit)) if tenant else 0

    @property
    def heavy(self) -> list[str]:
        """Tenants that hold more than their share, the heaviest first."""
        return sorted(self._heavy, key=lambda tenant: -self._held[tenant])

    def surplus(self, tenant: str) -> int:
        """Blocks that the tenant holds beyond its share."""
        return max(0, self._held[tenant] - self._limit)

    def stored(self, tenant: str, keys: Sequence[bytes], num_blocks: int) -> None:
        """The tenant holds these from now on, ``num_blocks`` in all; as EvictionPolicy.stored."""
        if tenant:
            self._count(tenant, num_blocks)
            self._orders.setdefault(tenant, LRU(1)).stored(keys)

    def touched(self, tenant: str, keys: Sequence[bytes]) -> None:
        if tenant:
            self._orders[tenant].touched(keys)

    def removed(self, tenant: str, key: bytes, num_blocks: int) -> None:
        """Idempotent for keys that ``victims`` gave."""
        if not tenant:
            return
        self._count(tenant, -num_blocks)
        self._orders[tenant].removed(key)
        if not self._held[tenant]:
            del self._held[tenant], self._orders[tenant]

    def _count(self, tenant: str, num_blocks: int) -> None:
        self._held[tenant] += num_blocks
        if self._held[tenant] > self._limit:
            self._heavy.add(tenant)
        else:
            self._heavy.discard(tenant)

    def victims(self, tenant: str, can_evict: Callable[[bytes], bool]) -> Iterator[bytes]:
        """As EvictionPolicy.victims, of one tenant's keys."""
        order = self._orders.get(tenant)
        return iter(()) if order is None else order.victims(can_evict)
