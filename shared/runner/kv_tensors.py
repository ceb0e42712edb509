"""Arena memory as tensors: the same bytes, never a copy. Owns the mapping from extents to shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shared.errors import ConfigError
from shared.types.kv import KVGroupSpec


def kv_tensor(data: memoryview, group: KVGroupSpec, block_size: int) -> torch.Tensor:
    """A group's blocks as [blocks, kv_head, layer, K|V, token, dim], float32, writable.

    The tensor keeps ``data`` alive (and exported) until it is freed. Raises ConfigError when the
    memory is not a whole number of extents, or the group's element type is not float32.
    """
    if group.dtype != "float32":
        raise ConfigError(f"KV of type {group.dtype} is not supported by this runner; supported: float32")
    extent = group.extent_bytes(block_size)
    num_blocks, rest = divmod(data.nbytes, extent)
    if rest or not num_blocks:
        raise ConfigError(f"{data.nbytes} bytes of KV memory are not a whole number of {extent}-byte blocks")
    shape = (num_blocks, group.num_kv_heads, group.num_layers, 2, block_size, group.head_dim)
    return torch.frombuffer(data, dtype=torch.float32).view(shape)


def extent_of(data: memoryview, block_id: int, extent_bytes: int) -> memoryview:
    """The bytes of one block."""
    return data[block_id * extent_bytes : (block_id + 1) * extent_bytes]


@dataclass(frozen=True)
class EmbeddingMemory:
    """The ``ec`` arena's block data: blocks of ``rows_per_block`` rows of ``row_bytes`` bytes, all
    float32. Row r of an item lies in its block ``block_ids[r // rows_per_block]``."""

    data: memoryview
    rows_per_block: int
    row_bytes: int

    def tensor(self) -> torch.Tensor:
        """All rows as [blocks * rows_per_block, hidden], writable; ``packed_rows`` indexes it.

        It keeps ``data`` alive until it is freed. Raises ConfigError on memory that does not fit.
        """
        block_bytes = self.rows_per_block * self.row_bytes
        if self.row_bytes % 4 or not block_bytes or not self.data.nbytes or self.data.nbytes % block_bytes:
            raise ConfigError(
                f"{self.data.nbytes} bytes of embedding memory do not fit blocks of {block_bytes} bytes"
            )
        return torch.frombuffer(self.data, dtype=torch.float32).view(-1, self.row_bytes // 4)


def packed_rows(block_ids: tuple[int, ...], num_rows: int, rows_per_block: int) -> torch.Tensor:
    """Indices into ``EmbeddingMemory.tensor`` of an item's rows, in order."""
    index = torch.arange(num_rows)
    blocks = torch.tensor(block_ids, dtype=torch.int64)
    return blocks[index // rows_per_block] * rows_per_block + index % rows_per_block
