"""The product of a few rows with a large matrix, on tensor cores, its ending fused in.

At these sizes a step waits for the weights, so their tile is the tensor core's large side and nothing of it
is spent on rows that are not there; weights come by the copy engine (TMA). A product whose inputs are split
is finished by whichever program comes last, which sums the parts in order: its bits do not depend on which
that is.

Shapes as in ``shared.kernels.gpu.stream``; M = rows of a tile, W = outputs of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from shared.kernels.gpu.launch import chained, gdc_launch_dependents, gdc_wait, is_chained, to_l2
from shared.kernels.gpu.stream import Ending, Stream, Tile, scales_of


class Scratch:
    """Memory that products of one stream of kernels share: parts of split ones, and who has come."""

    def __init__(self, device: torch.device, num_floats: int = 1 << 23, num_tiles: int = 1 << 14) -> None:
        self.parts = torch.empty(num_floats, dtype=torch.float32, device=device)
        self.counts = torch.zeros(num_tiles, dtype=torch.int32, device=device)


class Matmul:
    """One kind of product at one number of rows. ``fits`` says whether the tile can do the shape."""

    def __init__(self, tile: Tile, ending: Ending, num_rows: int, scratch: Scratch, eps: float) -> None:
        self._tile, self._ending, self._num_rows = tile, ending, num_rows
        self._scratch, self._eps = scratch, eps
        self._descriptors: dict[tuple[int, int, int], TensorDescriptor] = {}

    @staticmethod
    def fits(tile: Tile, outputs: int, inputs: int) -> bool:
        return outputs % tile.outputs == 0 and inputs % (tile.splits * tile.inputs) == 0

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
        """``x`` has at least a tile's rows. ``scaled``: ``x`` is the stream times a norm's weight, and the
        result is scaled by that norm. What the ending does not need may be anything. Returns the number of
        tiles of outputs."""
        tile, rows = self._tile, self._num_rows
        outputs, inputs = weight_NK.shape
        tiles, row_tiles = outputs // tile.outputs, triton.cdiv(rows, tile.rows)
        _matmul[(tiles * row_tiles * tile.splits,)](
            self._descriptor(x_BK, tile.rows, tile.inputs),
            self._descriptor(weight_NK, tile.outputs, tile.inputs),
            weight_NK,
            out_BZ,
            stream.x_BE,
            stream.weighted_BE,
            stream.squares_PB,
            stream.next_squares_PB,
            norm_E,
            peaks_PB,
            ids_PB,
            self._scratch.parts,
            self._scratch.counts,
            rows,
            outputs,
            stream.num_tiles,
            self._eps,
            INPUTS=inputs,
            SCALED=scaled,
            ROW_TILES=row_tiles,
            ENDING=int(self._ending),
            M=tile.rows,
            W=tile.outputs,
            K=tile.inputs,
            SPLITS=tile.splits,
            AHEAD=tile.ahead,
            CHAINED=is_chained(),
            num_warps=tile.warps,
            num_stages=tile.stages,
            **chained(),
        )
        return tiles

    def _descriptor(self, matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
        key = (matrix.data_ptr(), rows, columns)
        if key not in self._descriptors:
            self._descriptors[key] = TensorDescriptor.from_tensor(matrix, [rows, columns])
        return self._descriptors[key]


@triton.jit
def ended(
    result_WM, tile, row_M, used_M, scale_M, out, x, weighted, squares, norm, peaks, ids, num_rows, outputs,
    ENDING: tl.constexpr, W: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """The ending of a tile, transposed on the way out; see ``Ending``."""
    at_W = tile * W + tl.arange(0, W)
    place_MW = row_M[:, None] * outputs + at_W[None, :]
    used_MW = used_M[:, None]
    if ENDING == 0:
        tl.store(out + place_MW, tl.trans(result_WM * scale_M[None, :]), mask=used_MW)
    elif ENDING == 1:
        pairs = (result_WM * scale_M[None, :]).reshape(W // 2, 2, M).permute(0, 2, 1)
        gate_HM, up_HM = tl.split(pairs)
        at_H = tile * (W // 2) + tl.arange(0, W // 2)
        gated_MH = tl.trans(gate_HM / (1.0 + tl.exp(-gate_HM)) * up_HM)
        tl.store(out + row_M[:, None] * (outputs // 2) + at_H[None, :], gated_MH, mask=used_MW)
    elif ENDING == 2:
        before_MW = tl.load(x + place_MW, mask=used_MW, other=0)
        after_MW = (tl.trans(result_WM) + before_MW.to(tl.float32)).to(before_MW.dtype)
        tl.store(x + place_MW, after_MW, mask=used_MW)
        wide_MW = after_MW.to(tl.float32)
        weight_W = tl.load(norm + at_W).to(tl.float32)
        tl.store(weighted + place_MW, wide_MW * weight_W[None, :], mask=used_MW)
        tl.store(squares + tile * num_rows + row_M, tl.sum(wide_MW * wide_MW, 1), mask=used_M)
    else:
        logits_WM = (result_WM * scale_M[None, :]).to(out.dtype.element_ty)
        tl.store(out + place_MW, tl.trans(logits_WM), mask=used_MW)
        wide_WM = logits_WM.to(tl.float32)
        bad_M = tl.max((wide_WM != wide_WM).to(tl.int32), 0)
        known_WM = tl.where(wide_WM == wide_WM, wide_WM, float("-inf"))
        peak_M, place_M = tl.max(known_WM, 0, return_indices=True)
        tl.store(peaks + tile * num_rows + row_M, tl.where(bad_M > 0, float("inf"), peak_M), mask=used_M)
        tl.store(ids + tile * num_rows + row_M, place_M + tile * W, mask=used_M)


@triton.jit(do_not_specialize=["num_tiles"])
def _matmul(
    x_tiles, weight_tiles, weight, out, x, weighted, squares, next_squares, norm, peaks, ids, parts, counts,
    num_rows, outputs, num_tiles, eps,
    INPUTS: tl.constexpr, SCALED: tl.constexpr, ROW_TILES: tl.constexpr, ENDING: tl.constexpr,
    M: tl.constexpr, W: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, AHEAD: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    row_tile, split, tile = pid % ROW_TILES, pid // ROW_TILES % SPLITS, pid // (ROW_TILES * SPLITS)
    part: tl.constexpr = INPUTS // SPLITS
    if CHAINED:
        gdc_launch_dependents()
        if AHEAD > 0:
            at_W = tile * W + tl.arange(0, W)
            line = tl.arange(0, AHEAD // 64) * 64
            to_l2(weight + at_W[:, None].to(tl.int64) * INPUTS + split * part + line[None, :])
        gdc_wait()
    row_M = row_tile * M + tl.arange(0, M)
    used_M = row_M < num_rows
    result_WM = tl.zeros([W, M], tl.float32)
    for k in range(0, part, K):
        weight_WK = weight_tiles.load([tile * W, split * part + k])
        x_MK = x_tiles.load([row_tile * M, split * part + k])
        result_WM = tl.dot(weight_WK, x_MK.T, result_WM)
    scale_M = tl.full([M], 1.0, tl.float32)
    if SCALED:
        scale_M = scales_of(squares, row_M, used_M, num_rows, num_tiles, eps, INPUTS, M)
    if SPLITS == 1:
        ended(
            result_WM, tile, row_M, used_M, scale_M, out, x, weighted, next_squares, norm, peaks, ids,
            num_rows, outputs, ENDING, W, M,
        )  # fmt: skip
    else:
        place = tile * ROW_TILES + row_tile
        at_WM = tl.arange(0, W)[:, None] * M + tl.arange(0, M)[None, :]
        tl.store(parts + (place * SPLITS + split) * (W * M) + at_WM, result_WM)
        tl.debug_barrier()
        if tl.atomic_add(counts + place, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            total_WM = tl.zeros([W, M], tl.float32)
            for s in tl.static_range(SPLITS):
                total_WM += tl.load(parts + (place * SPLITS + s) * (W * M) + at_WM, cache_modifier=".cg")
            tl.store(counts + place, 0)
            ended(
                total_WM, tile, row_M, used_M, scale_M, out, x, weighted, next_squares, norm, peaks, ids,
                num_rows, outputs, ENDING, W, M,
            )  # fmt: skip
