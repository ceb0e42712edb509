"""Several kv_store nodes as one pool of embeddings: a media item's rows are one node's, or two nodes'.

Owns who is asked and offered; placement and the nodes themselves are ``nodes``'s.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple, Protocol

from shared.tiering.nodes import Node, NodeLease, NodePool
from shared.types.store import EmbeddingHit, EmbeddingKey
from shared.types.transfer import EcTransferParams


class EmbeddingNode(Node, Protocol):
    """One node; see ``EmbeddingClient``. Trouble is a miss, never an error."""

    async def offer(self, key: EmbeddingKey, params: EcTransferParams) -> bool: ...
    async def lookup(self, key: EmbeddingKey, rows_per_block: int) -> EmbeddingHit: ...
    async def release(self, lease_ids: tuple[str, ...]) -> None: ...


class FoundEmbedding(NamedTuple):
    """Stored embeddings, pinned under a lease that must be given back; without a hit both are None."""

    params: EcTransferParams | None = None
    lease: NodeLease | None = None


NOT_FOUND = FoundEmbedding()


class EmbeddingPool(NodePool[EmbeddingNode]):
    """See NodePool."""

    async def lookup(self, key: EmbeddingKey, rows_per_block: int) -> FoundEmbedding:
        """Ask the key's nodes, the second one when the first has nothing."""
        for address in self._homes(key.media_hash):
            if (node := self._nodes.get(address)) is None:  # it left while another was asked
                continue
            hit = await node.lookup(key, rows_per_block)
            if hit.lease_id:
                return FoundEmbedding(hit.params, NodeLease(address, hit.lease_id))
        return NOT_FOUND

    async def offer(self, key: EmbeddingKey, params: EcTransferParams) -> int:
        """Offer embeddings to the key's nodes; returns how many of these hold them then. They must stay as
        they are until it returns."""
        nodes = [self._nodes[address] for address in self._homes(key.media_hash)]
        return sum(await asyncio.gather(*(node.offer(key, params) for node in nodes)))

    async def release(self, lease: NodeLease) -> None:
        """Give a lease back. One of a node that has left ends by itself."""
        if (node := self._nodes.get(lease.node)) is not None:
            await node.release((lease.lease_id,))
