"""Matrix products of a decode step with what surrounds them fused in: the residual stream and its norms.

A norm's scale is one number a row, so a product takes the stream times the norm's weight, unscaled, and
scales its result. What adds to the stream therefore leaves three things behind: the stream, the stream times
the next norm's weight, and the sum of its squares, one partial sum a tile of features, summed in a fixed
order.

Owns the stream, the shapes of tiles, and the choice of kernel (``matmul`` or, for one row, ``matvec``).
Shapes: B = rows, E = hidden features, N, K = outputs and inputs of a product, P = tiles of E, Z = anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from shared.kernels.gpu.launch import chained, gdc_launch_dependents, gdc_wait, is_chained

#: Most tiles that the sums of squares of a stream may come in.
MAX_TILES = 1024


class Ending(IntEnum):
    """What a product does with its result: store it; gate it (pairs of columns: gate, up); add it to the
    stream; or store logits and the likeliest token of each tile."""

    STORE = 0
    GATE = 1
    ADD = 2
    LOGITS = 3


class Tile(NamedTuple):
    """A product's tile: ``rows`` 1 is the matrix-vector kernel. ``splits`` of the inputs are summed in order;
    ``ahead`` columns of the weights are brought to the second-level cache before the inputs exist."""

    rows: int
    outputs: int
    inputs: int
    splits: int
    stages: int
    warps: int
    ahead: int = 0


@dataclass
class Stream:
    """The residual stream of ``size`` rows. ``num_tiles``: into how many the sums of squares are cut now."""

    x_BE: torch.Tensor
    weighted_BE: torch.Tensor
    squares_PB: torch.Tensor
    next_squares_PB: torch.Tensor
    num_tiles: int = 1

    @classmethod
    def empty(cls, size: int, hidden: int, dtype: torch.dtype, device: torch.device) -> Stream:
        # The products' tiles have at least 16 rows.
        rows = max(16, size)
        x_BE, weighted_BE = (torch.zeros(rows, hidden, dtype=dtype, device=device) for _ in range(2))
        squares = torch.zeros(2, MAX_TILES * size, dtype=torch.float32, device=device)
        return cls(x_BE, weighted_BE, squares[0], squares[1])

    def added(self, num_tiles: int) -> None:
        """A product has added to it, leaving its sums of squares in so many tiles."""
        self.squares_PB, self.next_squares_PB = self.next_squares_PB, self.squares_PB
        self.num_tiles = num_tiles


def begin(
    token_ids_B: torch.Tensor,
    rows_B: torch.Tensor,
    last_R: torch.Tensor,
    table_VE: torch.Tensor,
    norm_E: torch.Tensor,
    stream: Stream,
) -> None:
    """Put embedding rows into the stream (ids as in ``tokens.embed``); ``norm_E`` is the first norm."""
    hidden = table_VE.shape[1]
    _begin[(len(token_ids_B),)](
        token_ids_B,
        rows_B,
        last_R,
        table_VE,
        norm_E,
        stream.x_BE,
        stream.weighted_BE,
        stream.squares_PB,
        HIDDEN=hidden,
        WIDTH=triton.next_power_of_2(hidden),
        CHAINED=is_chained(),
        num_warps=8,
        **chained(),
    )
    stream.num_tiles = 1


@triton.jit
def _begin(
    token_ids, rows, last, table, norm, x, weighted, squares,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at = tl.arange(0, WIDTH)
    inside = at < HIDDEN
    scale = tl.load(norm + at, mask=inside, other=0).to(tl.float32)
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    token_id = tl.load(token_ids + row)
    if token_id < 0:
        token_id = tl.load(last + tl.maximum(tl.load(rows + row), 0))
    token_id = tl.maximum(token_id, 0).to(tl.int64)
    value = tl.load(table + token_id * HIDDEN + at, mask=inside, other=0)
    tl.store(x + row * HIDDEN + at, value, mask=inside)
    wide = value.to(tl.float32)
    tl.store(weighted + row * HIDDEN + at, wide * scale, mask=inside)
    tl.store(squares + row, tl.sum(wide * wide, 0))


@triton.jit
def scales_of(squares, row_M, used_M, num_rows, num_tiles, eps, HIDDEN: tl.constexpr, ROWS: tl.constexpr):
    """1 / rms of these rows."""
    total_M = tl.zeros([ROWS], tl.float32)
    tile_P = tl.arange(0, 64)
    for first in range(0, num_tiles, 64):
        there = (first + tile_P < num_tiles)[:, None] & used_M[None, :]
        part = tl.load(squares + (first + tile_P)[:, None] * num_rows + row_M[None, :], mask=there, other=0)
        total_M += tl.sum(part, 0)
    return tl.rsqrt(total_M / HIDDEN + eps)
