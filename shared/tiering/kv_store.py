"""The store of KV blocks: what is offered, pulled, held and pinned, for one identity and one layout.

Owns offers under way. Where blocks are, what is evicted and what is loaded again belongs to the tiers, bytes
to the puller. Single-threaded: the event loop. It never waits; ends come by callback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from shared.clock import Clock, Entropy
from shared.failpoints import FailpointError, Failpoints
from shared.kv_cache.convert import can_convert
from shared.telemetry import metrics
from shared.telemetry.logs import get_logger
from shared.tiering.base import Filled
from shared.tiering.cpu import CpuTier
from shared.tiering.leases import Pinned, PrefixLeases
from shared.tiering.lower import LowerTiers
from shared.tiering.observe import TierMetrics
from shared.tiering.pulls import Pulls
from shared.tiering.tiered import KvTiers
from shared.transfer.arena import Arena
from shared.transfer.handoff import MAX_PULL_BLOCKS, BlockPull, PullOutcome
from shared.types.identity import IdentityKey, LayoutSpec
from shared.types.store import BlockKey, OfferedBlock, StoreHit
from shared.types.transfer import AgentInfo, KvTransferParams

_log = get_logger(__name__)

MISS = StoreHit()


class Limits(NamedTuple):
    """How blocks in memory are kept: eviction by the policy of this name, what one tenant may take from
    others, and how long a reader's lease is."""

    policy: str
    tenant_share: float
    lease_s: float


@dataclass(slots=True)
class _Offer:
    """One call of ``offer``: blocks in the store so far, and pulls that are still out."""

    done: Callable[[int], None]
    num_kept: int = 0
    num_pulls: int = 0


class _Landing(NamedTuple):
    """One pull of an offer: reserved blocks, in the order of what they are to hold."""

    offer: _Offer
    group: int
    ids: list[int]
    blocks: list[OfferedBlock]


class KvStore:
    """Holds blocks of ``layout`` in ``arena`` (one tier a group). ``agent_info`` tells readers where.

    A block becomes findable only after its bytes were pulled, or loaded, and verified; a producer that dies
    on the way leaves nothing behind but quarantine, which ends when nothing can land any more.
    """

    def __init__(
        self,
        identity: IdentityKey,
        layout: LayoutSpec,
        arena: Arena,
        agent_info: Callable[[], AgentInfo],
        pulls: Pulls,
        lower: LowerTiers,
        clock: Clock,
        entropy: Entropy,
        failpoints: Failpoints,
        limits: Limits,
    ) -> None:
        self.layout = layout
        self._agent_info = agent_info
        self._pulls = pulls
        self._failpoints = failpoints
        self._cpu = [
            CpuTier(
                arena,
                group,
                clock,
                policy=limits.policy,
                observer=TierMetrics("cpu"),
                tenant_share=limits.tenant_share,
            )
            for group in range(len(layout.groups))
        ]
        self._leases = PrefixLeases(self._cpu, clock, entropy, limits.lease_s)
        self._tiers = KvTiers(identity, layout, arena, self._cpu, lower, self._leases)
        self._coming: set[tuple[int, bytes]] = set()

    def offer(self, producer: AgentInfo, blocks: Sequence[OfferedBlock], done: Callable[[int], None]) -> None:
        """Pull what is not in memory yet; then call ``done``, once, with the number of these blocks that are
        in the store. The producer keeps them as they are until then."""
        offer = _Offer(done)
        if producer.layout is None or not self._fits(producer.layout):
            _log.warning("an offer of another layout was refused", worker=producer.worker_id)
        else:
            for group in range(len(self._cpu)):
                wanted = [b for b in blocks if b.key.group == group and self._is_sound(b)]
                for tenant, unknown in self._unknown(offer, group, wanted).items():
                    self._take(offer, producer, group, tenant, unknown)
        if not offer.num_pulls:
            done(offer.num_kept)

    def _fits(self, layout: LayoutSpec) -> bool:
        """Heads may be shared otherwise; blocks are kept as they are."""
        return layout.block_size == self.layout.block_size and can_convert(layout, self.layout)

    def _is_sound(self, block: OfferedBlock) -> bool:
        heads = self.layout.groups[block.key.group].num_kv_heads
        return len(block.key.token_ids) == self.layout.block_size and len(block.ref.checksums) == heads

    def _unknown(
        self, offer: _Offer, group: int, blocks: Sequence[OfferedBlock]
    ) -> dict[str, list[OfferedBlock]]:
        """Those that are neither held nor coming, by tenant; held ones count as used just now."""
        tier = self._cpu[group]
        unknown: dict[bytes, OfferedBlock] = {}
        again: list[BlockKey] = []
        for block in blocks:
            if tier.find(block.key) is not None:
                again.append(block.key)
            elif (group, block.key.block_hash) not in self._coming:
                unknown.setdefault(block.key.block_hash, block)
        self._tiers.offered_again(group, again)
        offer.num_kept += len(again)
        by_tenant: dict[str, list[OfferedBlock]] = {}
        for block in unknown.values():
            by_tenant.setdefault(block.tenant, []).append(block)
        return by_tenant

    def _take(
        self, offer: _Offer, producer: AgentInfo, group: int, tenant: str, blocks: Sequence[OfferedBlock]
    ) -> None:
        metrics.STORE_OFFERED.inc(len(blocks))
        ids = self._cpu[group].reserve(len(blocks), tenant)
        for first in range(0, len(ids), MAX_PULL_BLOCKS):
            part = slice(first, first + MAX_PULL_BLOCKS)
            landing = _Landing(offer, group, ids[part], list(blocks[: len(ids)][part]))
            self._coming.update((group, block.key.block_hash) for block in landing.blocks)
            offer.num_pulls += 1
            pairs = zip(landing.blocks, landing.ids, strict=True)
            self._pulls.begin(
                producer,
                group,
                [BlockPull(block.ref, local) for block, local in pairs],
                partial(self._landed, landing),
                partial(self._settled, landing),
                checksum_heads=self.layout.groups[group].num_kv_heads,
            )

    def _landed(self, landing: _Landing, outcome: PullOutcome) -> None:
        offer, group = landing.offer, landing.group
        good: list[Filled] = []
        bad: list[int] = []
        for block_id, block, ok in zip(landing.ids, landing.blocks, outcome.ok, strict=True):
            self._coming.discard((group, block.key.block_hash))
            if ok and self._may_publish():
                good.append(Filled(block_id, block.key, block.ref.checksums, block.tenant))
            else:
                bad.append(block_id)
        # What a late landing may still write into is remembered: ``_settled`` gives just that back.
        landing.ids[:] = [] if outcome.terminal else bad
        self._cpu[group].discard(bad, late=not outcome.terminal)
        self._tiers.commit(group, good)
        metrics.STORE_ACCEPTED.inc(len(good))
        offer.num_kept += len(good)
        offer.num_pulls -= 1
        if not offer.num_pulls:
            offer.done(offer.num_kept)

    def _may_publish(self) -> bool:
        try:
            self._failpoints.hit("store.before_publish")
        except FailpointError:
            return False
        return True

    def _settled(self, landing: _Landing) -> None:
        self._cpu[landing.group].settle(landing.ids)

    def lookup(
        self,
        layout: LayoutSpec,
        keys: Sequence[BlockKey],
        done: Callable[[StoreHit], None],
        tenant: str = "",
    ) -> None:
        """Call ``done``, once, with the longest prefix that every group has, pinned until ``release`` or the
        lease's end: at once when memory decides it, else when lower tiers gave what they could. The keys of a
        group are consecutive blocks, in order; their content is compared, not their hash alone. What is
        loaded counts for ``tenant``."""
        self.expire()
        metrics.STORE_QUERIES.inc(len(keys))
        if self._fits(layout):
            self._tiers.lookup(keys, lambda lease_id, pinned: done(self._hit(lease_id, pinned)), tenant)
        else:
            done(MISS)

    def _hit(self, lease_id: str, pinned: Pinned) -> StoreHit:
        if not lease_id:
            return MISS
        metrics.LEASES_GRANTED.labels("store").inc()
        metrics.STORE_HITS.inc(sum(map(len, pinned)))
        producer = self._agent_info()
        runs = tuple(
            KvTransferParams(lease_id, producer, group, 0, tuple(tier.ref(i) for i in pinned[group]))
            for group, tier in enumerate(self._cpu)
        )
        return StoreHit(lease_id, self._leases.lease_s, len(pinned[0]), runs)

    def release(self, lease_ids: Sequence[str]) -> None:
        """End leases; unknown ones are ignored."""
        self._leases.release(lease_ids)

    def expire(self) -> None:
        """End the leases whose time is over; call it now and then."""
        metrics.LEASES_EXPIRED.labels("store").inc(self._leases.expire())

    def news(self) -> None:
        """Lower tiers may know more now."""
        self._tiers.news()

    # Numbers, over all groups.

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def num_blocks(self) -> int:
        return sum(tier.pool.num_blocks for tier in self._cpu)

    @property
    def num_free(self) -> int:
        """Blocks that can be reserved, held but unpinned ones included."""
        return sum(tier.num_free for tier in self._cpu)

    @property
    def num_held(self) -> int:
        """Blocks that are found by their key."""
        return sum(tier.num_held for tier in self._cpu)

    @property
    def num_quarantined(self) -> int:
        return sum(tier.pool.num_quarantined for tier in self._cpu)

    def check_integrity(self) -> None:
        """Raises when an invariant is broken; for tests and idle times."""
        for tier in self._cpu:
            tier.check_integrity()
