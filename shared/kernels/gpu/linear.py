"""``x @ weight.T + bias``: by cuBLAS, or so that a row's bits depend on nothing but the row.

cuBLAS chooses its kernel, and with it the order of summation, by the number of rows. ``Invariant`` always
sums the inputs in the same order, in steps of one size and never split; only how many rows share a tile
changes, and a tensor core treats each of them alike.

Shapes: T = rows, N, K = outputs and inputs.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

#: Outputs of a tile, and inputs of one step of its sum.
_OUTPUTS, _INPUTS = 128, 64
#: Row tiles that walk along the outputs together, so that they find weights in the cache.
_TOGETHER = 8


class Linear(Protocol):
    """[T, K] and [N, K] and [N] or nothing -> [T, N], in the type of the first."""

    def __call__(
        self, x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None
    ) -> torch.Tensor: ...


def fastest(x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """cuBLAS's choice."""
    return torch.nn.functional.linear(x_TK, weight_NK, bias_N)


class Invariant:
    """The same bits for a row alone and in any batch. Owns the weights' descriptors."""

    def __init__(self) -> None:
        self._weights: dict[int, TensorDescriptor] = {}

    def __call__(
        self, x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows, (outputs, inputs) = len(x_TK), weight_NK.shape
        out_TN = torch.empty(rows, outputs, dtype=x_TK.dtype, device=x_TK.device)
        if not rows:
            return out_TN
        tile = next((size for size in (16, 32, 64) if rows <= size), 128)
        key = weight_NK.data_ptr()
        if key not in self._weights:
            self._weights[key] = TensorDescriptor.from_tensor(weight_NK, [_OUTPUTS, _INPUTS])
        _linear[(triton.cdiv(rows, tile) * triton.cdiv(outputs, _OUTPUTS),)](
            TensorDescriptor.from_tensor(x_TK.contiguous(), [tile, _INPUTS]),
            self._weights[key],
            out_TN if bias_N is None else bias_N,
            out_TN,
            rows,
            outputs,
            INPUTS=inputs,
            BIASED=bias_N is not None,
            M=tile,
            W=_OUTPUTS,
            K=_INPUTS,
            TOGETHER=_TOGETHER,
            num_warps=8 if tile == 128 else 4,
            num_stages=4,
        )
        return out_TN


@triton.jit
def _linear(
    x_tiles, weight_tiles, bias, out, rows, outputs,
    INPUTS: tl.constexpr, BIASED: tl.constexpr, M: tl.constexpr, W: tl.constexpr, K: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """One tile a program; what lies outside of a matrix is read as zero."""
    pid = tl.program_id(0)
    row_tiles, tiles = tl.cdiv(rows, M), tl.cdiv(outputs, W)
    first = pid // (TOGETHER * tiles) * TOGETHER
    together = tl.minimum(row_tiles - first, TOGETHER)
    row_tile = first + pid % (TOGETHER * tiles) % together
    tile = pid % (TOGETHER * tiles) // together
    result_WM = tl.zeros([W, M], tl.float32)
    for k in range(0, INPUTS, K):
        weight_WK = weight_tiles.load([tile * W, k])
        x_MK = x_tiles.load([row_tile * M, k])
        result_WM = tl.dot(weight_WK, x_MK.T, result_WM, input_precision="ieee")
    row_M = row_tile * M + tl.arange(0, M)
    at_W = tile * W + tl.arange(0, W)
    if BIASED:
        result_WM += tl.load(bias + at_W, mask=at_W < outputs, other=0).to(tl.float32)[:, None]
    used_MW = (row_M < rows)[:, None] & (at_W < outputs)[None, :]
    place_MW = row_M[:, None].to(tl.int64) * outputs + at_W[None, :]
    tl.store(out + place_MW, tl.trans(result_WM), mask=used_MW)
