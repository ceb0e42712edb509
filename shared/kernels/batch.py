"""What attention must know of a step: tokens, rows, positions and the paged KV memory, as tensors.

Shapes: T = tokens of the step, H = query heads, K = kv heads, D = head dimension, B = blocks,
L = layers of the group, S = tokens of a block, R = rows, M = blocks of a row's table.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from shared.kernels import records

#: Most tokens of a tile (TILE_TOKENS in native/batch.h).
TILE_TOKENS = 4
#: Multiples that the compiled kernels ask for: vector lanes, and tokens scored at once.
LANES, TOKENS_AT_ONCE = 8, 4


@dataclass(frozen=True)
class Heads:
    """Head geometry. ``scale`` multiplies the scores; ``eps`` belongs to the norms."""

    num_heads: int
    num_kv_heads: int
    dim: int
    scale: float
    eps: float

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.dim

    @cached_property
    def record(self) -> records.Heads:
        return records.Heads(self.num_heads, self.num_kv_heads, self.dim, self.scale, self.eps)


@dataclass(frozen=True)
class PagedKV:
    """One KV group's memory and its block tables. ``window`` in tokens, None = unlimited.

    The tensors are borrowed: they must outlive this object, and kernels write ``data``.
    """

    data_BKL2SD: torch.Tensor
    tables_RM: torch.Tensor
    window: int | None = None

    @property
    def block_size(self) -> int:
        return self.data_BKL2SD.shape[4]

    @cached_property
    def record(self) -> records.KVGroup:
        data, tables = self.data_BKL2SD, self.tables_RM
        return records.KVGroup(
            data.data_ptr(),
            data.stride(0),
            data.stride(1),
            tables.data_ptr(),
            tables.stride(0),
            self.block_size,
            self.window or 0,
        )


@dataclass(frozen=True)
class Batch:
    """The tokens of one step. Tokens of one row are neighbours, at consecutive positions.

    ``starts`` are the token indices at which a row's run begins, and the number of tokens at the end.
    """

    rows_T: torch.Tensor  # int32: index into the block tables
    positions_T: torch.Tensor  # int32
    starts: tuple[int, ...]
    cos_TD: torch.Tensor  # float32, half of the head dimension
    sin_TD: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return self.rows_T.shape[0]

    @cached_property
    def _tiles(self) -> torch.Tensor:
        edges = [
            edge
            for first, last in zip(self.starts, self.starts[1:], strict=False)
            for edge in range(first, last, TILE_TOKENS)
        ]
        return torch.tensor([*edges, self.num_tokens], dtype=torch.int32)

    @cached_property
    def record(self) -> records.Batch:
        return records.Batch(
            self.rows_T.data_ptr(),
            self.positions_T.data_ptr(),
            self._tiles.data_ptr(),
            self.cos_TD.data_ptr(),
            self.sin_TD.data_ptr(),
            self.num_tokens,
            self._tiles.shape[0] - 1,
        )


def fits_native(heads: Heads, block_size: int) -> bool:
    """Whether the compiled kernels can take this geometry."""
    return heads.dim % (2 * LANES) == 0 and block_size % TOKENS_AT_ONCE == 0


def pointer(tensor: torch.Tensor | None) -> int | None:
    """A tensor's address for a C call; None stays None."""
    return None if tensor is None else tensor.data_ptr()
