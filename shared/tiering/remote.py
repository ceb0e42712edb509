"""A worker's client of the KV store. A store that is slow, gone or of another mind is a miss, never an
error: the worker computes instead. Owns that rule and the pause after a failure; not the wire.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.clock import Clock
from shared.errors import TriptychError
from shared.kv_cache.block_hash import HashedBlock
from shared.kv_cache.manager import CommittedBlock
from shared.rpc.kv_store import MAX_LOOKED_UP, MAX_OFFERED, KvStoreStub
from shared.telemetry.logs import get_logger
from shared.types.identity import IdentityKey, LayoutSpec
from shared.types.store import BlockKey, OfferedBlock, StoreHit
from shared.types.transfer import AgentInfo

_log = get_logger(__name__)

#: After a failure the store is left alone for so long.
PAUSE_S = 1.0
MISS = StoreHit()


class KvStoreClient:
    """Event loop only. Blocks of a worker have this identity and layout."""

    def __init__(self, address: str, identity: IdentityKey, layout: LayoutSpec, clock: Clock) -> None:
        self._stub = KvStoreStub(address)
        self._identity = identity
        self._layout = layout
        self._clock = clock
        self._paused_until = 0.0

    @property
    def paused(self) -> bool:
        """The store has failed a moment ago; calls are answered here meanwhile."""
        return self._clock.now() < self._paused_until

    async def offer(self, producer: AgentInfo, blocks: Sequence[CommittedBlock]) -> int:
        """Offer committed blocks, of which the first ``MAX_OFFERED`` count; returns how many the store
        holds then. The blocks must stay as they are until it returns."""
        if self.paused or not blocks:
            return 0
        offered = [
            OfferedBlock(BlockKey(b.group, b.block_hash, b.parent, b.token_ids, b.media), b.ref)
            for b in blocks[:MAX_OFFERED]
        ]
        try:
            return await self._stub.offer(self._identity, producer, offered)
        except TriptychError as error:
            self._failed("offer", error)
            return 0

    async def lookup(self, wanted: Sequence[HashedBlock]) -> StoreHit:
        """The longest stored prefix of these consecutive blocks, in every group, under a lease that
        must be released; MISS without one."""
        groups = range(len(self._layout.groups))
        if self.paused or not wanted or len(wanted) * len(groups) > MAX_LOOKED_UP:
            return MISS
        keys = [BlockKey(g, b.block_hash, b.parent, b.token_ids, b.media) for g in groups for b in wanted]
        try:
            hit = await self._stub.lookup(self._identity, self._layout, keys)
        except TriptychError as error:
            self._failed("lookup", error)
            return MISS
        return hit if hit.lease_id and _is_whole(hit, len(groups), len(wanted)) else MISS

    async def release(self, lease_ids: Sequence[str]) -> None:
        """Give leases back; a lost release is made good by the lease's end."""
        if self.paused or not lease_ids:
            return
        try:
            await self._stub.release(lease_ids)
        except TriptychError as error:
            self._failed("release", error)

    async def close(self) -> None:
        await self._stub.close()

    def _failed(self, call: str, error: TriptychError) -> None:
        self._paused_until = self._clock.now() + PAUSE_S
        _log.warning("the kv_store does not answer", call=call, code=error.code)


def _is_whole(hit: StoreHit, num_groups: int, num_wanted: int) -> bool:
    """Whether the hit has one run a group, each of as many blocks as it says."""
    return (
        0 < hit.num_blocks <= num_wanted
        and sorted(run.group for run in hit.runs) == list(range(num_groups))
        and all(len(run.blocks) == hit.num_blocks for run in hit.runs)
    )
