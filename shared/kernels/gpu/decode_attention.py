"""Attention of rows with one new token each, with everything around it in one kernel: the norm and rotation
of queries and keys, the write of the new K and V, and the merge of a context that is split.

A program takes one row, one kv head and one split of the row's context. The new token's own K and V never
come back from memory. The block table is read one tile ahead, so that loads of K and V overlap in full.
Splits are merged by whichever program comes last, in order.

Shapes as in ``shared.kernels.batch``; B = rows, G = query heads of a kv head (filled up to 16), N = keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from shared.kernels.batch import Heads, PagedKV
from shared.kernels.gpu.launch import chained, gdc_launch_dependents, gdc_wait, is_chained

#: Rows of a tensor core's tile; the query heads of a kv head fill some of them.
_QUERIES = 16


class Split(NamedTuple):
    """``keys`` of a tile, ``splits`` of a context, and how the kernel is compiled."""

    keys: int
    splits: int
    stages: int
    warps: int


class DecodeAttention:
    """For ``num_rows`` rows. ``fits`` says whether it can do a geometry."""

    def __init__(self, split: Split, heads: Heads, num_rows: int, device: torch.device) -> None:
        self._split, self._heads, self._num_rows = split, heads, num_rows
        units = num_rows * heads.num_kv_heads
        self._parts = torch.empty(units * split.splits * _QUERIES * heads.dim, device=device)
        self._peaks = torch.empty(units * split.splits * 2 * _QUERIES, device=device)
        self._counts = torch.zeros(units, dtype=torch.int32, device=device)

    @staticmethod
    def fits(heads: Heads, kv: PagedKV) -> bool:
        group = heads.num_heads // heads.num_kv_heads
        power_of_two = heads.dim & (heads.dim - 1) == 0
        return power_of_two and heads.dim >= 16 and group <= _QUERIES and kv.window is None

    def __call__(
        self,
        qkv_BW: torch.Tensor,
        out_BW: torch.Tensor,
        kv: PagedKV,
        layer: int,
        rows_B: torch.Tensor,
        positions_B: torch.Tensor,
        cos_PD: torch.Tensor,
        sin_PD: torch.Tensor,
        q_norm_D: torch.Tensor | None,
        k_norm_D: torch.Tensor | None,
    ) -> None:
        """``qkv`` is neither normed nor rotated. A row at a negative position is padding, and passed over.
        ``cos_PD`` and ``sin_PD`` are of every position, not of these."""
        heads, split, data = self._heads, self._split, kv.data_BKL2SD[:, :, layer]
        normed = q_norm_D is not None
        _decode_attention[(heads.num_kv_heads * split.splits * self._num_rows,)](
            qkv_BW,
            out_BW,
            data,
            kv.tables_RM,
            rows_B,
            positions_B,
            cos_PD,
            sin_PD,
            q_norm_D if normed else cos_PD,
            k_norm_D if normed else cos_PD,
            self._parts,
            self._peaks,
            self._counts,
            qkv_BW.stride(0),
            out_BW.stride(0),
            data.stride(0),
            data.stride(1),
            kv.tables_RM.stride(0),
            heads.scale,
            heads.eps,
            KV_HEADS=heads.num_kv_heads,
            GROUP=heads.num_heads // heads.num_kv_heads,
            DIM=heads.dim,
            BLOCK=kv.block_size,
            KEYS=split.keys,
            SPLITS=split.splits,
            NORMED=normed,
            QUERIES=_QUERIES,
            CHAINED=is_chained(),
            num_warps=split.warps,
            num_stages=split.stages,
            **chained(),
        )


@triton.jit
def _turn(norm, cos, sin, at_D, DIM: tl.constexpr, NORMED: tl.constexpr):
    """Norm and rotation as two factors: of a head's features, and of them with their halves exchanged."""
    over_D, half_D = at_D ^ (DIM // 2), at_D % (DIM // 2)
    straight_D, crossed_D = tl.load(cos + half_D), tl.load(sin + half_D)
    crossed_D = tl.where(at_D < DIM // 2, -crossed_D, crossed_D)
    if NORMED:
        straight_D *= tl.load(norm + at_D).to(tl.float32)
        crossed_D *= tl.load(norm + over_D).to(tl.float32)
    return straight_D[None, :], crossed_D[None, :]


@triton.jit
def _turned(at, at_D, used, straight_1D, crossed_1D, eps, DIM: tl.constexpr, NORMED: tl.constexpr):
    """Features [.., D] normed and rotated, in float32."""
    a = tl.load(at + at_D[None, :], mask=used, other=0).to(tl.float32)
    b = tl.load(at + (at_D ^ (DIM // 2))[None, :], mask=used, other=0).to(tl.float32)
    turned = a * straight_1D + b * crossed_1D
    if NORMED:
        turned *= tl.rsqrt(tl.sum(a * a, 1) / DIM + eps)[:, None]
    return turned


@triton.jit
def _visited(q_GD, k_ND, v_ND, there_N, peak_G, mass_G, mixed_GD, scale):
    """One tile of keys more, scores in units of log 2 (Milakov and Gimelshein, 2018)."""
    score_GN = tl.dot(q_GD, k_ND.T, input_precision="ieee") * scale
    score_GN = tl.where(there_N[None, :], score_GN, float("-inf"))
    new_G = tl.maximum(peak_G, tl.max(score_GN, 1))
    weight_GN = tl.exp2(score_GN - new_G[:, None])
    shrink_G = tl.exp2(peak_G - new_G)
    mixed_GD = tl.dot(weight_GN.to(v_ND.dtype), v_ND, mixed_GD * shrink_G[:, None], input_precision="ieee")
    return new_G, mass_G * shrink_G + tl.sum(weight_GN, 1), mixed_GD


@triton.jit
def _context(
    q_GD, keys, values, tables, block_N, low, high, block_stride, peak_G, mass_G, mixed_GD, scale, at_D,
    DIM: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """All keys from ``low`` to ``high``; ``block_N`` are the blocks of the first tile."""
    at_N = tl.arange(0, KEYS)
    slot_N, place_N = at_N % BLOCK * DIM, at_N // BLOCK
    for at in range(low, high, KEYS):
        at_ND = (block_N.to(tl.int64) * block_stride + slot_N)[:, None] + at_D[None, :]
        block_N = tl.load(tables + (at + KEYS) // BLOCK + place_N, mask=at + KEYS + at_N < high, other=0)
        there_N = at + at_N < high
        k_ND = tl.load(keys + at_ND)
        # Slots behind the context may hold anything, and nothing times NaN is not nothing.
        v_ND = tl.load(values + at_ND, mask=there_N[:, None], other=0)
        peak_G, mass_G, mixed_GD = _visited(q_GD, k_ND, v_ND, there_N, peak_G, mass_G, mixed_GD, scale)
    return peak_G, mass_G, mixed_GD


@triton.jit
def _merged(
    parts, peaks, counts, unit, split, peak_G, mass_G, mixed_GD, place_GD, used_GD, out, at_G, at_D,
    SPLITS: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Leave this split's part behind; the last to come merges all of them, in order."""
    peaks += unit * (SPLITS * 2 * QUERIES)
    parts += unit * (SPLITS * QUERIES * DIM)
    at_GD = at_G[:, None] * DIM + at_D[None, :]
    tl.store(peaks + split * 2 * QUERIES + at_G, peak_G)
    tl.store(peaks + split * 2 * QUERIES + QUERIES + at_G, mass_G)
    tl.store(parts + split * (QUERIES * DIM) + at_GD, mixed_GD)
    tl.debug_barrier()
    if tl.atomic_add(counts + unit, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
        tl.store(counts + unit, 0)
        at_S = tl.arange(0, SPLITS)
        each_SG = tl.load(peaks + at_S[:, None] * (2 * QUERIES) + at_G[None, :], cache_modifier=".cg")
        top_G = tl.max(each_SG, 0)
        total_GD = tl.zeros([QUERIES, DIM], tl.float32)
        total_G = tl.zeros([QUERIES], tl.float32)
        for s in tl.static_range(SPLITS):
            weight_G = tl.exp2(tl.load(peaks + s * 2 * QUERIES + at_G, cache_modifier=".cg") - top_G)
            total_G += weight_G * tl.load(peaks + s * 2 * QUERIES + QUERIES + at_G, cache_modifier=".cg")
            part_GD = tl.load(parts + s * (QUERIES * DIM) + at_GD, cache_modifier=".cg")
            total_GD += weight_G[:, None] * part_GD
        tl.store(out + place_GD, total_GD / total_G[:, None], mask=used_GD)


@triton.jit
def _decode_attention(
    qkv, out, data, tables, rows, positions, cos, sin, q_norm, k_norm, parts, peaks, counts,
    qkv_stride, out_stride, block_stride, head_stride, table_stride, scale, eps,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
    SPLITS: tl.constexpr, NORMED: tl.constexpr, QUERIES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    head, split, row = pid % KV_HEADS, pid // KV_HEADS % SPLITS, pid // (KV_HEADS * SPLITS)
    at_G, at_D, at_N = tl.arange(0, QUERIES), tl.arange(0, DIM), tl.arange(0, KEYS)
    position = tl.load(positions + row)
    if position < 0:
        if CHAINED:
            gdc_launch_dependents()
            gdc_wait()
        return
    share = tl.cdiv(tl.cdiv(position, KEYS), SPLITS) * KEYS
    low = split * share
    high = tl.minimum(low + share, position)
    tables += tl.load(rows + row).to(tl.int64) * table_stride
    keys = data + head * head_stride
    values = keys + BLOCK * DIM
    block_N = tl.load(tables + low // BLOCK + at_N // BLOCK, mask=low + at_N < high, other=0)
    used_GD = (at_G < GROUP)[:, None] & (at_D >= 0)[None, :]
    cos += position * (DIM // 2)
    sin += position * (DIM // 2)
    q_straight, q_crossed = _turn(q_norm, cos, sin, at_D, DIM, NORMED)
    k_straight, k_crossed = _turn(k_norm, cos, sin, at_D, DIM, NORMED)
    new = tl.load(tables + position // BLOCK).to(tl.int64) * block_stride + position % BLOCK * DIM
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    qkv += row.to(tl.int64) * qkv_stride
    q_at = qkv + (head * GROUP + at_G)[:, None] * DIM
    q_GD = _turned(q_at, at_D, used_GD, q_straight, q_crossed, eps, DIM, NORMED).to(data.dtype.element_ty)
    k_at = qkv + (KV_HEADS * GROUP + head) * DIM
    whole = (at_D >= 0)[None, :]
    k_1D = _turned(k_at, at_D, whole, k_straight, k_crossed, eps, DIM, NORMED).to(data.dtype.element_ty)
    v_D = tl.load(k_at + KV_HEADS * DIM + at_D)
    scale *= 1.4426950408889634
    own = tl.sum(q_GD.to(tl.float32) * k_1D.to(tl.float32), 1) * scale
    first = split == 0
    if first:
        tl.store(keys + new + at_D[None, :], k_1D)
        tl.store(values + new + at_D, v_D)
    peak_G = tl.where(first, own, -1.0e30)
    mass_G = tl.where(first, tl.full([QUERIES], 1.0, tl.float32), 0.0)
    mixed_GD = tl.where(first, tl.zeros([QUERIES, DIM], tl.float32) + v_D.to(tl.float32)[None, :], 0.0)
    peak_G, mass_G, mixed_GD = _context(
        q_GD, keys, values, tables, block_N, low, high, block_stride, peak_G, mass_G, mixed_GD, scale,
        at_D, DIM, BLOCK, KEYS,
    )  # fmt: skip
    place_GD = row.to(tl.int64) * out_stride + (head * GROUP + at_G)[:, None] * DIM + at_D[None, :]
    if SPLITS == 1:
        tl.store(out + place_GD, mixed_GD / mass_G[:, None], mask=used_GD)
    else:
        _merged(
            parts, peaks, counts, row * KV_HEADS + head, split, peak_G, mass_G, mixed_GD, place_GD, used_GD,
            out, at_G, at_D, SPLITS, QUERIES, DIM,
        )  # fmt: skip
