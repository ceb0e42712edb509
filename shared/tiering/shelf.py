"""Items held in the blocks of an arena, found by nobody but their owner's index; and what goes for room.

Owns which blocks an item fills, pins, shares of tenants and the order of eviction. Owns neither the bytes
nor the meaning of keys. Single-threaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shared.clock import Clock
from shared.kv_cache.block_pool import BlockPool, Generations
from shared.tiering.eviction import EvictionPolicy
from shared.tiering.observe import MemoryObserver
from shared.tiering.tenants import TenantShares


class ShelfItem(NamedTuple):
    """``blocks`` were reserved and are filled. ``parent``: the key of the item that it follows, which is not
    given up before it."""

    key: bytes
    blocks: tuple[int, ...]
    parent: bytes = b""
    tenant: str = ""


@dataclass(slots=True, eq=False)
class _Held:
    blocks: tuple[int, ...]
    parent: bytes
    tenant: str
    stored_at: float
    used_at: float


class Shelf:
    """Blocks of ``pool`` are plain, *reserved* (by ``reserve``), *held* (the shelf is one of their owners) or
    quarantined. A held item goes when room is needed, unless one of its blocks is pinned.

    Of a chain of items later ones go first, whatever the policy says; only when nothing else can go a
    parent goes before its child. ``tenant_share`` of all blocks is what a tenant may take from others.
    """

    def __init__(
        self,
        num_blocks: int,
        block_bytes: int,
        policy: EvictionPolicy[bytes],
        clock: Clock,
        *,
        generations: Generations | None = None,
        observer: MemoryObserver | None = None,
        tenant_share: float = 1.0,
    ) -> None:
        self.pool = BlockPool(num_blocks, generations)
        self._block_bytes = block_bytes
        self._policy = policy
        self._clock = clock
        self._observer = observer or MemoryObserver()
        self._shares = TenantShares(max(1, int(num_blocks * tenant_share)))
        self._items: dict[bytes, _Held] = {}
        self._children: Counter[bytes] = Counter()
        self._pins = [0] * num_blocks
        self._is_held = bytearray(num_blocks)
        self._num_idle = 0
        #: Told of each key that is held no more.
        self.on_removed: Callable[[bytes], None] = lambda key: None

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: bytes) -> bool:
        return key in self._items

    def blocks(self, key: bytes) -> tuple[int, ...]:
        """KeyError for an item that is not held."""
        return self._items[key].blocks

    @property
    def num_free(self) -> int:
        """Blocks that are plain, or held and not pinned."""
        return self.pool.num_free + self._num_idle

    def num_held_by(self, tenant: str) -> int:
        """Blocks of a tenant's items."""
        return self._shares.num_held(tenant)

    # Blocks.

    def reserve(self, n: int, tenant: str = "") -> list[int]:
        """At most ``n`` blocks for the tenant; fewer when pinned items, or others' shares, leave no more.

        What is free is anybody's. Beyond its share a tenant makes room from its own items only; within it,
        first from tenants that are beyond theirs."""
        if (short := n - self.pool.num_free) > 0:
            own = min(short, self._shares.excess(tenant, n))
            self._evict_of(tenant, own)
            others = short - own
            for heavy in self._shares.heavy if others else ():
                others -= self._evict_of(heavy, min(others, self._shares.surplus(heavy)))
            for can_evict in (self._is_last, self._is_idle):
                others -= self._evict(self._policy.victims(can_evict), others)
        return self.pool.allocate(min(n, self.pool.num_free))

    def discard(self, ids: Sequence[int], *, late: bool) -> None:
        """Give reserved blocks back; see Tier.discard."""
        if late:
            self.pool.quarantine(ids)
        else:
            self.pool.free(ids)

    def settle(self, ids: Sequence[int]) -> None:
        self.pool.release_quarantined(ids)

    def pin(self, ids: Sequence[int]) -> None:
        """Keep blocks of held items where they are, until ``unpin`` was called as often."""
        self.pool.share(ids)
        for block_id in ids:
            if not self._pins[block_id]:
                self._num_idle -= 1
            self._pins[block_id] += 1

    def unpin(self, ids: Sequence[int]) -> None:
        self.pool.free(ids)
        for block_id in ids:
            self._pins[block_id] -= 1
            if not self._pins[block_id] and self._is_held[block_id]:
                self._num_idle += 1

    # Items.

    def hold(self, items: Sequence[ShelfItem]) -> None:
        """Items whose reserved blocks are filled, those of one chain in its order; their keys are new."""
        now = self._clock.now()
        for item in items:
            self._items[item.key] = _Held(item.blocks, item.parent, item.tenant, now, now)
            self._children[item.parent] += 1
            for block_id in item.blocks:
                self._is_held[block_id] = 1
            self._num_idle += len(item.blocks)
        keys = [item.key for item in items]
        self._policy.stored(keys)
        before = self.before(items[0].parent) if items else []
        self._policy.followed(before)
        for tenant in {item.tenant for item in items}:
            mine = [item for item in items if item.tenant == tenant]
            self._shares.stored(tenant, [i.key for i in mine], sum(len(i.blocks) for i in mine))
            self._shares.touched(tenant, before)

    def use(self, keys: Sequence[bytes]) -> None:
        """Held items of one chain, in its order, were used: and so was what they follow."""
        if not keys:
            return
        now, items = self._clock.now(), self._items
        self._observer.reused(now - items[keys[0]].used_at)
        chain = [*self.before(items[keys[0]].parent), *keys]
        for key in chain:
            items[key].used_at = now
        self._policy.touched(chain)
        for tenant in {items[key].tenant for key in keys}:
            self._shares.touched(tenant, chain)

    def before(self, key: bytes) -> list[bytes]:
        """The chain of held items that ends with this one, in its order; empty when it is not held."""
        chain: dict[bytes, None] = {}
        while key in self._items and key not in chain:  # hashes cut short may go round in a circle
            chain[key] = None
            key = self._items[key].parent
        return list(reversed(chain))

    def remove(self, key: bytes, reason: str) -> None:
        """Hold an item no more; pinned blocks stay with those who pinned them."""
        self._policy.removed(key)
        self._drop(key, reason)

    def check_integrity(self) -> None:
        """Raises InternalError or ValueError when an invariant is broken; for tests and idle times."""
        self.pool.check_integrity()
        held = [block_id for item in self._items.values() for block_id in item.blocks]
        idle = sum(not self._pins[block_id] for block_id in held)
        if (
            sorted(held) != [b for b, is_held in enumerate(self._is_held) if is_held]
            or idle != self._num_idle
        ):
            raise ValueError("the shelf's blocks and its items disagree")
        if len(self._policy) != len(self._items):
            raise ValueError("the policy and the shelf's items disagree")

    # Eviction.

    def _is_idle(self, key: bytes) -> bool:
        return not any(self._pins[block_id] for block_id in self._items[key].blocks)

    def _is_last(self, key: bytes) -> bool:
        return not self._children[key] and self._is_idle(key)

    def _evict(self, victims: Iterator[bytes], num_blocks: int) -> int:
        """Blocks that became plain; the policy has let go of what it named."""
        freed = 0
        while freed < num_blocks and (key := next(victims, None)) is not None:
            freed += self._drop(key, "capacity")
        return freed

    def _evict_of(self, tenant: str, num_blocks: int) -> int:
        freed = 0
        victims = self._shares.victims(tenant, self._is_last)
        while freed < num_blocks and (key := next(victims, None)) is not None:
            self._policy.removed(key)
            freed += self._drop(key, "share")
        return freed

    def _drop(self, key: bytes, reason: str) -> int:
        item = self._items.pop(key)
        self._children[item.parent] -= 1
        if not self._children[item.parent]:
            del self._children[item.parent]
        for block_id in item.blocks:
            self._is_held[block_id] = 0
            if not self._pins[block_id]:
                self._num_idle -= 1
        self._shares.removed(item.tenant, key, len(item.blocks))
        self.pool.free(item.blocks)
        now, nbytes = self._clock.now(), len(item.blocks) * self._block_bytes
        self._observer.evicted(reason, nbytes, now - item.stored_at, now - item.used_at)
        self.on_removed(key)
        return len(item.blocks)
