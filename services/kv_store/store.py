"""The store itself: what is offered, pulled, held and pinned, for one identity and one layout.

Owns offers under way and leases. Blocks and eviction belong to the tiers, bytes to the puller.
Single-threaded: the event loop. It never waits; an offer's end comes by callback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from shared.clock import Clock, Entropy
from shared.engine.observe import observe_pull
from shared.failpoints import FailpointError, Failpoints
from shared.kv_cache.convert import can_convert
from shared.telemetry import metrics
from shared.telemetry.logs import get_logger
from shared.tiering.base import Tier
from shared.tiering.cpu import CpuTier
from shared.tiering.leases import PrefixLeases
from shared.transfer.arena import Arena
from shared.transfer.handoff import MAX_PULL_BLOCKS, BlockPull, Pull, PullOutcome
from shared.types.identity import LayoutSpec
from shared.types.store import BlockKey, OfferedBlock, StoreHit
from shared.types.transfer import AgentInfo, KvTransferParams

_log = get_logger(__name__)

MISS = StoreHit()


class PullPort(Protocol):
    def submit(self, pull: Pull) -> None: ...


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

    A block becomes findable only after its bytes were pulled and verified; a producer that dies on the
    way leaves nothing behind but quarantine, which ends when nothing can land any more.
    """

    def __init__(
        self,
        layout: LayoutSpec,
        arena: Arena,
        agent_info: Callable[[], AgentInfo],
        clock: Clock,
        entropy: Entropy,
        failpoints: Failpoints,
        *,
        lease_s: float,
    ) -> None:
        self.layout = layout
        self._agent_info = agent_info
        self._failpoints = failpoints
        evicted = metrics.STORE_EVICTED.inc
        self._tiers = [CpuTier(arena, group, evicted) for group in range(len(layout.groups))]
        self._leases = PrefixLeases(self._tiers, clock, entropy, lease_s)
        self._puller: PullPort | None = None
        self._next_pull = 0
        self._landings: dict[str, _Landing] = {}
        self._coming: set[tuple[int, bytes]] = set()
        self._quarantined: dict[str, tuple[int, list[int]]] = {}

    def bind(self, puller: PullPort) -> None:
        """Give the store its puller; before the first offer."""
        self._puller = puller

    def offer(self, producer: AgentInfo, blocks: Sequence[OfferedBlock], done: Callable[[int], None]) -> None:
        """Pull what is not here yet; then call ``done``, once, with the number of these blocks that are
        in the store. The producer keeps them as they are until then."""
        offer = _Offer(done)
        if self._puller is None or producer.layout is None or not can_convert(producer.layout, self.layout):
            _log.warning("an offer of another layout was refused", worker=producer.worker_id)
        else:
            for group in range(len(self._tiers)):
                wanted = [b for b in blocks if b.key.group == group and self._is_sound(b)]
                self._take(offer, producer, group, self._unknown(offer, group, wanted), self._puller)
        if not offer.num_pulls:
            done(offer.num_kept)

    def _is_sound(self, block: OfferedBlock) -> bool:
        heads = self.layout.groups[block.key.group].num_kv_heads
        return len(block.key.token_ids) == self.layout.block_size and len(block.ref.checksums) == heads

    def _unknown(self, offer: _Offer, group: int, blocks: list[OfferedBlock]) -> list[OfferedBlock]:
        """Those that are neither held nor coming; held ones count as used just now."""
        tier = self._tiers[group]
        unknown: dict[bytes, OfferedBlock] = {}
        for block in blocks:
            if held := tier.lookup((block.key,)):
                tier.pin(held)
                tier.unpin(held)
                offer.num_kept += 1
            elif (group, block.key.block_hash) not in self._coming:
                unknown.setdefault(block.key.block_hash, block)
        return list(unknown.values())

    def _take(
        self, offer: _Offer, producer: AgentInfo, group: int, blocks: list[OfferedBlock], puller: PullPort
    ) -> None:
        metrics.STORE_OFFERED.inc(len(blocks))
        ids = self._tiers[group].reserve(len(blocks))
        for first in range(0, len(ids), MAX_PULL_BLOCKS):
            part = slice(first, first + MAX_PULL_BLOCKS)
            landing = _Landing(offer, group, ids[part], blocks[: len(ids)][part])
            self._next_pull += 1
            pull_id = f"offer-{self._next_pull}"
            self._landings[pull_id] = landing
            self._coming.update((group, block.key.block_hash) for block in landing.blocks)
            offer.num_pulls += 1
            puller.submit(
                Pull(
                    pull_id=pull_id,
                    producer=producer,
                    region="kv",
                    group=group,
                    blocks=tuple(
                        BlockPull(b.ref, local) for b, local in zip(landing.blocks, landing.ids, strict=True)
                    ),
                    checksum_heads=self.layout.groups[group].num_kv_heads,
                )
            )

    def on_outcome(self, outcome: PullOutcome) -> None:
        """A pull has ended, or was given up."""
        observe_pull("offer", outcome)
        landing = self._landings.pop(outcome.pull_id)
        tier, offer = self._tiers[landing.group], landing.offer
        bad: list[int] = []
        for block_id, block, ok in zip(landing.ids, landing.blocks, outcome.ok, strict=True):
            self._coming.discard((landing.group, block.key.block_hash))
            if ok and self._publish(tier, block_id, block):
                offer.num_kept += 1
            else:
                bad.append(block_id)
        if bad and not outcome.terminal:
            self._quarantined[outcome.pull_id] = (landing.group, bad)
        tier.discard(bad, late=not outcome.terminal)
        offer.num_pulls -= 1
        if not offer.num_pulls:
            offer.done(offer.num_kept)

    def _publish(self, tier: Tier, block_id: int, block: OfferedBlock) -> bool:
        try:
            self._failpoints.hit("store.before_publish")
        except FailpointError:
            return False
        tier.commit(block_id, block.key, block.ref.checksums)
        metrics.STORE_ACCEPTED.inc()
        return True

    def on_settled(self, pull_id: str) -> None:
        """Nothing of this pull can land any more."""
        group, ids = self._quarantined.pop(pull_id, (0, []))
        self._tiers[group].settle(ids)

    def lookup(self, layout: LayoutSpec, keys: Sequence[BlockKey]) -> StoreHit:
        """The longest prefix held in every group, pinned until ``release`` or the lease's end. The keys
        of a group are consecutive blocks, in order; their content is compared, not their hash alone."""
        self.expire()
        metrics.STORE_QUERIES.inc(len(keys))
        lease_id, pinned = self._leases.grant(keys) if can_convert(layout, self.layout) else ("", ())
        if not lease_id:
            return MISS
        metrics.LEASES_GRANTED.labels("store").inc()
        metrics.STORE_HITS.inc(sum(map(len, pinned)))
        producer = self._agent_info()
        runs = tuple(
            KvTransferParams(lease_id, producer, group, 0, tuple(tier.ref(i) for i in pinned[group]))
            for group, tier in enumerate(self._tiers)
        )
        return StoreHit(lease_id, self._leases.lease_s, len(pinned[0]), runs)

    def release(self, lease_ids: Sequence[str]) -> None:
        """End leases; unknown ones are ignored."""
        self._leases.release(lease_ids)

    def expire(self) -> None:
        """End the leases whose time is over; call it now and then."""
        metrics.LEASES_EXPIRED.labels("store").inc(self._leases.expire())

    # Numbers, over all groups.

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def num_blocks(self) -> int:
        return sum(tier.pool.num_blocks for tier in self._tiers)

    @property
    def num_free(self) -> int:
        """Blocks that can be reserved, held but unpinned ones included."""
        return sum(tier.pool.num_free for tier in self._tiers)

    @property
    def num_held(self) -> int:
        """Blocks that are found by their key."""
        return sum(tier.pool.num_published for tier in self._tiers)

    @property
    def num_quarantined(self) -> int:
        return sum(tier.pool.num_quarantined for tier in self._tiers)

    def check_integrity(self) -> None:
        """Raises InternalError when an invariant is broken; for tests and idle times."""
        for tier in self._tiers:
            tier.pool.check_integrity()
