"""What workers and the KV store say to each other about full blocks, and about media items' embeddings."""

from __future__ import annotations

import hashlib

from msgspec import Struct

from shared.types.transfer import BlockRef, EcTransferParams, KvTransferParams


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
    """A committed block that the store may pull from its producer. ``tenant``: see ``tenant_of``."""

    key: BlockKey
    ref: BlockRef
    tenant: str = ""


def tenant_of(cache_salt: str) -> str:
    """A short name for whoever uses this salt, for quotas; empty for what all share. What keeps contents
    apart is the salt inside of block hashes, in full width."""
    return hashlib.sha256(cache_salt.encode()).hexdigest()[:16] if cache_salt else ""


class StoreHit(Struct, frozen=True):
    """The longest stored prefix: ``num_blocks`` leading blocks in every group, one run a group,
    pinned for ``lease_s`` seconds. Without a hit ``lease_id`` is empty and nothing is pinned."""

    lease_id: str = ""
    lease_s: float = 0.0
    num_blocks: int = 0
    runs: tuple[KvTransferParams, ...] = ()


class EmbeddingKey(Struct, frozen=True):
    """Everything that decides a media item's embeddings, beside the model's identity; and their shape.

    ``media_hash`` in full width; ``salt_digest`` is the SHA-256 of a tenant's salt.
    """

    media_hash: bytes
    decode_options: str
    processor_version: str
    salt_digest: bytes
    num_rows: int
    row_bytes: int
    dtype: str


class EmbeddingHit(Struct, frozen=True):
    """Stored embeddings, pinned for ``lease_s`` seconds; ``params`` is None without a hit."""

    lease_id: str = ""
    lease_s: float = 0.0
    params: EcTransferParams | None = None
