"""A worker's side of the kv_stores: hits before a prompt is computed, offers after blocks are final."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from shared.engine.desk import PullDesk
from shared.engine.inbox import Inbox
from shared.engine.landing import Landing
from shared.engine.observe import observe_pull
from shared.engine.tier_costs import TierCosts
from shared.errors import OutOfBlocks
from shared.kv_cache.block_hash import BlockHasher
from shared.kv_cache.manager import CommittedBlock, KVCacheManager
from shared.kv_cache.segments import WantedBlock, wanted_blocks
from shared.scheduler.sequence import Sequence
from shared.telemetry import metrics
from shared.tiering.pool import NO_HIT, PoolHit
from shared.transfer.handoff import PullOutcome
from shared.types.store import tenant_of


class StoreLink:
    """No store: nothing is found and nothing is kept. Base of the real link."""

    def load(self, sequence: Sequence, then: Callable[[], None]) -> None:
        """Bring what the store holds of the prompt into the sequence's table, then call ``then``
        (always, in the engine thread)."""
        then()

    def offer(self, blocks: tuple[CommittedBlock, ...]) -> None:
        """Offer final blocks for keeping, in the background."""

    def forget(self, sequence: Sequence) -> None:
        """The request is being stopped: whatever is still landing for it is closed, and then its table."""


class StoreCalls(Protocol):
    """The stores' RPCs as calls that answer by callback, in any thread. ``usable``: any store answers."""

    @property
    def usable(self) -> bool: ...
    def lookup(
        self, wanted: tuple[WantedBlock, ...], tenant: str, done: Callable[[PoolHit], None]
    ) -> None: ...
    def release(self, hit: PoolHit) -> None: ...
    def offer(self, blocks: tuple[CommittedBlock, ...], done: Callable[[int], None]) -> None: ...


class RemoteStoreLink(StoreLink):
    """Talks to the kv_stores. Engine thread only, except the callbacks of ``calls``."""

    def __init__(
        self,
        calls: StoreCalls,
        kv: KVCacheManager,
        hasher: BlockHasher,
        desk: PullDesk,
        inbox: Inbox,
        *,
        costs: TierCosts,
        deadline_s: float,
        max_offered_blocks: int,
    ) -> None:
        self._calls = calls
        self._kv = kv
        self._hasher = hasher
        self._desk = desk
        self._inbox = inbox
        self._deadline_s = deadline_s
        self._costs = costs
        self._max_offered = max_offered_blocks
        self._num_offered = 0
        self._landings: dict[str, tuple[Landing, PoolHit]] = {}

    def load(self, sequence: Sequence, then: Callable[[], None]) -> None:
        request, spec = sequence.request, self._kv.spec
        usable = (len(sequence.tokens) - 1) // spec.block_size
        if not usable or not self._calls.usable:
            then()
            return
        held = self._kv.open(
            sequence.key,
            sequence.tokens,
            request.media,
            request.cache_salt,
            request.adapter,
            max_cached_tokens=len(sequence.tokens) - 1,
        )
        sequence.kv_open = True
        sequence.num_cached = sequence.num_computed = held
        first = held // spec.block_size
        if usable == first or not self._costs.prefers_loading((usable - first) * spec.block_size):
            then()
            return
        blocks = self._hasher.prompt(sequence.tokens, request.media, request.cache_salt, request.adapter)
        metrics.STORE_QUERIES.inc(usable - first)
        asked_at = self._costs.now()

        def answered(hit: PoolHit) -> None:
            # What it took, without the engine's own step behind which it is looked at.
            seconds = self._costs.now() - asked_at
            self._inbox.post(lambda: self._found(sequence, first, seconds, hit, then))

        tenant = tenant_of(request.cache_salt)
        self._calls.lookup(wanted_blocks(blocks, first, usable), tenant, answered)

    def forget(self, sequence: Sequence) -> None:
        landing, hit = self._landings.pop(sequence.key, (None, NO_HIT))
        if landing is not None:
            landing.close()
            self._calls.release(hit)
            sequence.kv_open = False

    def offer(self, blocks: tuple[CommittedBlock, ...]) -> None:
        # The request may have ended with this very step: then only what is cached is still there.
        blocks = tuple(block for block in blocks if self._is_kept(block))
        if not blocks or not self._calls.usable or self._num_offered + len(blocks) > self._max_offered:
            return
        self._num_offered += len(blocks)
        for block in blocks:
            self._kv.pin(block.group, (block.block_id,))
        metrics.STORE_OFFERED.inc(len(blocks))
        self._calls.offer(blocks, lambda kept: self._inbox.post(lambda: self._offered(blocks)))

    def _is_kept(self, block: CommittedBlock) -> bool:
        pool = self._kv.pool(block.group)
        return pool.ref_count(block.block_id) > 0 or pool.key(block.block_id) is not None

    def _offered(self, blocks: tuple[CommittedBlock, ...]) -> None:
        self._num_offered -= len(blocks)
        for block in reversed(blocks):  # the first to be unused is the first to go: of a prefix the tail
            self._kv.unpin(block.group, (block.block_id,))

    def _found(
        self, sequence: Sequence, first: int, lookup_s: float, hit: PoolHit, then: Callable[[], None]
    ) -> None:
        if sequence.done or not hit.num_blocks:
            if hit.leases:
                self._calls.release(hit)
            then()
            return
        end = (first + hit.num_blocks) * self._kv.spec.block_size
        try:
            self._kv.reserve(sequence.key, end, writable_from=sequence.num_computed)
        except OutOfBlocks:
            self._calls.release(hit)
            then()
            return
        metrics.STORE_HITS.inc(hit.num_blocks)
        landing = Landing(
            sequence.key,
            first,
            self._kv,
            self._desk,
            self._deadline_s,
            lambda outcome: self._landed(sequence, first, lookup_s, hit, outcome, then),
        )
        self._landings[sequence.key] = landing, hit
        for run in hit.runs:
            landing.pull(run.producer, run.group, first + run.first, run.blocks)

    def _landed(
        self,
        sequence: Sequence,
        first: int,
        lookup_s: float,
        hit: PoolHit,
        outcome: PullOutcome,
        then: Callable[[], None],
    ) -> None:
        observe_pull("store", outcome)
        landing, _ = self._landings.get(sequence.key, (None, NO_HIT))
        if landing is None or not landing.idle:
            return
        del self._landings[sequence.key]
        self._calls.release(hit)
        self._costs.loaded(hit.num_blocks * self._kv.spec.block_size, lookup_s + outcome.seconds)
        if landing.lost or sequence.done:
            landing.close()
            sequence.kv_open = False
            sequence.num_cached = sequence.num_computed = 0
        else:
            num_valid = landing.num_valid(first + hit.num_blocks)
            end = num_valid * self._kv.spec.block_size
            self._kv.commit(sequence.key, end, landing.checksums(num_valid))
            sequence.num_cached = sequence.num_computed = end
        then()
