"""Several kv_store nodes as one pool of KV blocks: who is asked, who is offered what, and what their answers
make.

Owns the hit that is put together of several nodes' hits. Placement, by segments of blocks, and the nodes
themselves are ``nodes``'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from shared.kv_cache.block_hash import HashedBlock
from shared.kv_cache.manager import CommittedBlock
from shared.kv_cache.segments import WantedBlock
from shared.tiering.nodes import Node, NodeLease, NodePool
from shared.types.store import StoreHit
from shared.types.transfer import AgentInfo, KvTransferParams


class StoreNode(Node, Protocol):
    """One node; see ``KvStoreClient``. Trouble is a miss, never an error."""

    async def offer(self, producer: AgentInfo, blocks: Sequence[CommittedBlock]) -> int: ...
    async def lookup(self, wanted: Sequence[HashedBlock], tenant: str) -> StoreHit: ...
    async def release(self, lease_ids: Sequence[str]) -> None: ...


class PoolHit(NamedTuple):
    """The longest prefix that the nodes hold together: ``num_blocks`` leading blocks in every group, in runs
    of several producers whose ``first`` counts from the first block asked for. All ``leases`` must be given
    back, without a single block too."""

    num_blocks: int = 0
    runs: tuple[KvTransferParams, ...] = ()
    leases: tuple[NodeLease, ...] = ()


NO_HIT = PoolHit()


class _Part(NamedTuple):
    """Where a wanted block was found: the ``offset``-th of a node's hit."""

    hit: StoreHit
    offset: int


class StorePool(NodePool[StoreNode]):
    """See NodePool; keys are names of segments."""

    async def lookup(self, wanted: Sequence[WantedBlock], tenant: str = "") -> PoolHit:
        """The longest prefix of a tenant's consecutive blocks that the nodes hold. Each node is asked once
        for all of its segments, all nodes at once; then the keepers of second copies for what was not found.
        A node says nothing of what follows its first gap: where copies have gaps, the prefix may end at the
        second."""
        homes = {segment: self._homes(segment) for segment in dict.fromkeys(w.segment for w in wanted)}
        found: list[_Part | None] = [None] * len(wanted)
        leases: list[NodeLease] = []
        for rank in range(self._replicas):
            places: dict[str, list[int]] = {}
            for place, block in enumerate(wanted):
                home = homes[block.segment]
                if found[place] is None and rank < len(home):
                    places.setdefault(home[rank], []).append(place)
            calls = (self._ask(node, [wanted[n] for n in asked], tenant) for node, asked in places.items())
            hits = await asyncio.gather(*calls)
            for (node, asked), hit in zip(places.items(), hits, strict=True):
                if hit.lease_id:
                    leases.append(NodeLease(node, hit.lease_id))
                for offset, place in enumerate(asked[: hit.num_blocks]):
                    found[place] = _Part(hit, offset)
        return _joined(found, leases)

    async def offer(self, producer: AgentInfo, blocks: Sequence[CommittedBlock]) -> int:
        """Offer committed blocks to the nodes of their segments; returns how many copies these hold then.
        The blocks must stay as they are until it returns."""
        shares: dict[str, list[CommittedBlock]] = {}
        for block in blocks:
            for node in self._homes(block.segment):
                shares.setdefault(node, []).append(block)
        offers = (self._nodes[node].offer(producer, share) for node, share in shares.items())
        return sum(await asyncio.gather(*offers))

    async def release(self, leases: Sequence[NodeLease]) -> None:
        """Give leases back. Those of a node that has left end by themselves."""
        by_node: dict[str, list[str]] = {}
        for lease in leases:
            by_node.setdefault(lease.node, []).append(lease.lease_id)
        nodes = [(self._nodes.get(node), ids) for node, ids in by_node.items()]
        await asyncio.gather(*(node.release(ids) for node, ids in nodes if node is not None))

    async def _ask(self, address: str, wanted: Sequence[WantedBlock], tenant: str) -> StoreHit:
        node = self._nodes.get(address)
        return StoreHit() if node is None else await node.lookup([want.block for want in wanted], tenant)


def _joined(found: Sequence[_Part | None], leases: Sequence[NodeLease]) -> PoolHit:
    """The leading blocks that were found, in as few runs as the nodes' hits allow."""
    runs: list[KvTransferParams] = []
    first = num_blocks = 0
    for place, part in enumerate([*found, None]):
        before = found[place - 1] if place else None
        if before is not None:
            if part is not None and part.hit is before.hit and part.offset == before.offset + 1:
                continue
            runs += _slices(before, first, place)
        first = num_blocks = place
        if part is None:
            break
    return PoolHit(num_blocks, tuple(runs), tuple(leases))


def _slices(last: _Part, first: int, stop: int) -> list[KvTransferParams]:
    """Blocks first .. stop - 1 of those asked for, of which ``last`` is the last, in every group."""
    part = slice(last.offset + 1 - (stop - first), last.offset + 1)
    return [
        KvTransferParams(run.handoff_id, run.producer, run.group, first, run.blocks[part])
        for run in last.hit.runs
    ]
