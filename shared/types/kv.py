"""Geometry of the KV cache: groups, blocks and extents. No tensors, no block ids."""

from __future__ import annotations

from msgspec import Struct

#: Bytes of one element, by the dtype names that may appear in a KV or embedding record.
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint64": 8}


class KVGroupSpec(Struct, frozen=True):
    """Layers that share heads, head dimension, dtype and window.

    A block of one group is one contiguous extent in the order
    ``[kv_head, layer, K|V, token, dim]``.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    window: int | None = None

    def head_bytes(self, block_size: int) -> int:
        """Bytes that one kv_head occupies in a block (all layers, K and V)."""
        return self.num_layers * 2 * block_size * self.head_dim * ITEM_BYTES[self.dtype]

    def extent_bytes(self, block_size: int) -> int:
        """Bytes of one block of this group."""
        return self.num_kv_heads * self.head_bytes(block_size)


class KVCacheSpec(Struct, frozen=True):
    """All groups of a model; every group has its own block pool and block tables."""

    block_size: int
    groups: tuple[KVGroupSpec, ...]

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` positions, the last one perhaps partly."""
        return -(-num_tokens // self.block_size)
