"""What workers and the KV store say to each other about full blocks."""

from __future__ import annotations

from msgspec import Struct

from shared.types.transfer import BlockRef, KvTransferParams


class BlockKey(Struct, frozen=True):
    """A full block's place in the hash chain, and the content that its hash stands for.

    ``media``: (mm_hash, the item's offset minus the block's start; may be negative).
    """

    group: int
    block_hash: bytes
    parent: bytes
    token_ids: tuple[int, ...]
    media: tuple[tuple[str, int], ...] = ()


class OfferedBlock(Struct, frozen=True):
    """A committed block that the store may pull from its producer."""

    key: BlockKey
    ref: BlockRef


class StoreHit(Struct, frozen=True):
    """The longest stored prefix: ``num_blocks`` leading blocks in every group, one run a group,
    pinned for ``lease_s`` seconds. Without a hit ``lease_id`` is empty and nothing is pinned."""

    lease_id: str = ""
    lease_s: float = 0.0
    num_blocks: int = 0
    runs: tuple[KvTransferParams, ...] = ()
