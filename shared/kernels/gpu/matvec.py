"""The product of one row with a large matrix, at the speed of memory, its ending fused in.

No tensor cores: each weight is used once. A program keeps one tile of weights ahead in registers; the first
is on its way before the kernel's inputs exist. Shapes as in ``shared.kernels.gpu.stream``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.kernels.gpu.launch import chained, gdc_launch_dependents, gdc_wait, is_chained
from shared.kernels.gpu.stream import MAX_TILES, Ending, Stream, Tile


class Matvec:
    """One kind of product of one row; the call of ``Matmul``. A tile without stages keeps its weights in
    registers, one with stages lets the compiler pipeline them."""

    def __init__(self, tile: Tile, ending: Ending, eps: float) -> None:
        self._tile, self._ending, self._eps = tile, ending, eps

    @staticmethod
    def fits(tile: Tile, outputs: int, inputs: int) -> bool:
        return outputs % tile.outputs == 0 and inputs % tile.inputs == 0 and inputs > tile.inputs

    def __call__(
        self,
        x_BK: torch.Tensor,
        weight_NK: torch.Tensor,
        out_BZ: torch.Tensor,
        stream: Stream,
        norm_E: torch.Tensor,
        peaks_PB: torch.Tensor,
        ids_PB: torch.Tensor,
        *,
        scaled: bool,
    ) -> int:
        """See ``Matmul``."""
        tile = self._tile
        outputs, inputs = weight_NK.shape
        tiles = outputs // tile.outputs
        _matvec[(tiles,)](
            x_BK,
            weight_NK,
            out_BZ,
            stream.x_BE,
            stream.weighted_BE,
            stream.squares_PB,
            stream.next_squares_PB,
            norm_E,
            peaks_PB,
            ids_PB,
            stream.num_tiles,
            self._eps,
            INPUTS=inputs,
            SCALED=scaled,
            ENDING=int(self._ending),
            W=tile.outputs,
            K=tile.inputs,
            STAGES=tile.stages,
            TILES=MAX_TILES,
            CHAINED=is_chained(),
            num_warps=tile.warps,
            **chained(),
        )
        return tiles


@triton.jit
def _ended(
    result_W, tile, out, x, weighted, squares, norm, peaks, ids, ENDING: tl.constexpr, W: tl.constexpr
):
    """See ``Ending``."""
    at_W = tile * W + tl.arange(0, W)
    if ENDING == 0:
        tl.store(out + at_W, result_W)
    elif ENDING == 1:
        gate_H, up_H = tl.split(result_W.reshape(W // 2, 2))
        at_H = tile * (W // 2) + tl.arange(0, W // 2)
        tl.store(out + at_H, gate_H / (1.0 + tl.exp(-gate_H)) * up_H)
    elif ENDING == 2:
        before_W = tl.load(x + at_W)
        after_W = (result_W + before_W.to(tl.float32)).to(before_W.dtype)
        tl.store(x + at_W, after_W)
        wide_W = after_W.to(tl.float32)
        tl.store(weighted + at_W, wide_W * tl.load(norm + at_W).to(tl.float32))
        tl.store(squares + tile, tl.sum(wide_W * wide_W, 0))
    else:
        logits_W = result_W.to(out.dtype.element_ty)
        tl.store(out + at_W, logits_W)
        wide_W = logits_W.to(tl.float32)
        bad = tl.max((wide_W != wide_W).to(tl.int32), 0)
        peak, place = tl.max(tl.where(wide_W == wide_W, wide_W, float("-inf")), 0, return_indices=True)
        tl.store(peaks + tile, tl.where(bad > 0, float("inf"), peak))
        tl.store(ids + tile, place + tile * W)


@triton.jit(do_not_specialize=["num_tiles"])
def _matvec(
    x_in, weight, out, x, weighted, squares, next_squares, norm, peaks, ids, num_tiles, eps,
    INPUTS: tl.constexpr, SCALED: tl.constexpr, ENDING: tl.constexpr, W: tl.constexpr, K: tl.constexpr,
    STAGES: tl.constexpr, TILES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    at_K = tl.arange(0, K)
    weights = weight + (tile * W + tl.arange(0, W))[:, None].to(tl.int64) * INPUTS + at_K[None, :]
    sum_WK = tl.zeros([W, K], tl.float32)
    if CHAINED:
        gdc_launch_dependents()
    if STAGES == 0:
        now_WK = tl.load(weights, eviction_policy="evict_first")
        if CHAINED:
            gdc_wait()
        for k in range(K, INPUTS, K):
            next_WK = tl.load(weights + k, eviction_policy="evict_first")
            sum_WK += now_WK.to(tl.float32) * tl.load(x_in + k - K + at_K).to(tl.float32)[None, :]
            now_WK = next_WK
        sum_WK += now_WK.to(tl.float32) * tl.load(x_in + INPUTS - K + at_K).to(tl.float32)[None, :]
    else:
        if CHAINED:
            gdc_wait()
        for k in tl.range(0, INPUTS, K, num_stages=STAGES):
            now_WK = tl.load(weights + k, eviction_policy="evict_first")
            sum_WK += now_WK.to(tl.float32) * tl.load(x_in + k + at_K).to(tl.float32)[None, :]
    result_W = tl.sum(sum_WK, 1)
    if SCALED:
        at_P = tl.arange(0, TILES)
        total = tl.sum(tl.load(squares + at_P, mask=at_P < num_tiles, other=0), 0)
        result_W *= tl.rsqrt(total / INPUTS + eps)
    _ended(result_W, tile, out, x, weighted, next_squares, norm, peaks, ids, ENDING, W)
