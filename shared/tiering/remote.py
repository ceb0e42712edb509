"""A worker's clients of one node of the KV store: of its blocks, and of its embeddings. A node that is slow,
gone or of another mind is a miss, never an error: the worker computes instead. Owns that rule, and the pause
after a failure until the node answers again; not the wire, and not which node keeps what (``nodes``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from shared.errors import TriptychError
from shared.kv_cache.block_hash import HashedBlock
from shared.kv_cache.manager import CommittedBlock
from shared.rpc.kv_store import MAX_LOOKED_UP, MAX_OFFERED, KvStoreStub
from shared.telemetry import metrics
from shared.telemetry.logs import get_logger
from shared.types.identity import IdentityKey, LayoutSpec
from shared.types.store import BlockKey, EmbeddingHit, EmbeddingKey, OfferedBlock, StoreHit
from shared.types.transfer import AgentInfo, EcTransferParams

_log = get_logger(__name__)
T = TypeVar("T")

#: A node that has failed is left alone, and asked so often, in seconds, whether it is back.
PROBE_S = 1.0
MISS = StoreHit()
NO_EMBEDDING = EmbeddingHit()


class NodeClient:
    """What clients of a node share. Event loop only. ``address`` is the node's name."""

    def __init__(self, address: str, identity: IdentityKey, *, probe_s: float = PROBE_S) -> None:
        self.address = address
        self._stub = KvStoreStub(address)
        self._identity = identity
        self._probe_s = probe_s
        self._probe: asyncio.Task[None] | None = None
        self._closed = False
        self._num_calls = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def paused(self) -> bool:
        """The node has failed and has not answered since, or is closed; calls are answered here."""
        return self._closed or self._probe is not None

    async def release(self, lease_ids: Sequence[str]) -> None:
        """Give leases back; a lost release is made good by the lease's end."""
        if self.paused or not lease_ids:
            return
        await self._call("release", self._stub.release(lease_ids), None)

    async def close(self) -> None:
        """Begin nothing any more, wait for the calls under way, and close. Calling it twice is safe."""
        self._closed = True
        await self._quiet.wait()
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)
        await self._stub.close()

    async def _call(self, call: str, reply: Coroutine[Any, Any, T], otherwise: T) -> T:
        """The reply to one call, or ``otherwise`` and a pause when there is none."""
        self._num_calls += 1
        self._quiet.clear()
        try:
            return await reply
        except TriptychError as error:
            metrics.STORE_NODE_FAILURES.labels(self.address, call).inc()
            if not self.paused:
                metrics.STORE_NODE_PAUSES.labels(self.address).inc()
                _log.warning("the kv_store does not answer", node=self.address, call=call, code=error.code)
                self._probe = asyncio.create_task(self._until_back())
            return otherwise
        finally:
            self._num_calls -= 1
            if not self._num_calls:
                self._quiet.set()

    async def _until_back(self) -> None:
        """Ask until the node answers: nobody's look-up has to wait for one that does not."""
        answers = False
        while not answers:
            await asyncio.sleep(self._probe_s)
            with suppress(TriptychError):
                await self._stub.status()
                answers = True
        self._probe = None
        _log.info("the kv_store answers again", node=self.address)


class KvStoreClient(NodeClient):
    """For KV blocks of a worker that has this identity and layout."""

    def __init__(
        self, address: str, identity: IdentityKey, layout: LayoutSpec, *, probe_s: float = PROBE_S
    ) -> None:
        super().__init__(address, identity, probe_s=probe_s)
        self._layout = layout

    async def offer(self, producer: AgentInfo, blocks: Sequence[CommittedBlock]) -> int:
        """Offer committed blocks, of which the first ``MAX_OFFERED`` count; returns how many the node
        holds then. The blocks must stay as they are until it returns."""
        if self.paused or not blocks:
            return 0
        offered = [
            OfferedBlock(BlockKey(b.group, b.block_hash, b.parent, b.token_ids, b.media), b.ref, b.tenant)
            for b in blocks[:MAX_OFFERED]
        ]
        return await self._call("offer", self._stub.offer(self._identity, producer, offered), 0)

    async def lookup(self, wanted: Sequence[HashedBlock], tenant: str = "") -> StoreHit:
        """The longest stored prefix of this list of a tenant's blocks, in every group, under a lease that
        must be released; MISS without one. What is too much for one call counts as not stored."""
        groups = range(len(self._layout.groups))
        wanted = wanted[: MAX_LOOKED_UP // max(1, len(groups))]
        if self.paused or not wanted:
            return MISS
        keys = [BlockKey(g, b.block_hash, b.parent, b.token_ids, b.media) for g in groups for b in wanted]
        call = self._stub.lookup(self._identity, self._layout, keys, tenant)
        hit = await self._call("lookup", call, MISS)
        return hit if hit.lease_id and _is_whole(hit, len(groups), len(wanted)) else MISS


class EmbeddingClient(NodeClient):
    """For embeddings of an encoder that has this identity."""

    async def offer(self, key: EmbeddingKey, params: EcTransferParams) -> bool:
        """Offer embeddings; returns whether the node holds them then. They must stay as they are until it
        returns."""
        if self.paused:
            return False
        return await self._call("offer", self._stub.offer_embedding(self._identity, key, params), False)

    async def lookup(self, key: EmbeddingKey, rows_per_block: int) -> EmbeddingHit:
        """Stored embeddings, under a lease that must be released; NO_EMBEDDING without one."""
        if self.paused:
            return NO_EMBEDDING
        call = self._stub.lookup_embedding(self._identity, key, rows_per_block)
        hit = await self._call("lookup", call, NO_EMBEDDING)
        return hit if hit.lease_id else NO_EMBEDDING


def _is_whole(hit: StoreHit, num_groups: int, num_wanted: int) -> bool:
    """Whether the hit has one run a group, each of as many blocks as it says."""
    return (
        0 < hit.num_blocks <= num_wanted
        and sorted(run.group for run in hit.runs) == list(range(num_groups))
        and all(len(run.blocks) == hit.num_blocks for run in hit.runs)
    )
