"""Rotary embedding with the KV write, and paged attention for a whole mixed batch, on a GPU.

The same two calls as ``shared.kernels.attention``, whose twins are their references. Queries of one kv head
share its K and V: a program takes a few tokens of one row with all query heads of one kv head. ``alike``, a
token's bits (in bfloat16) depend on its own query and its row's KV alone, however the row is cut into steps:
keys are visited in tiles that begin at multiples of TILE_KEYS, and one with nothing visible changes nothing.

Shapes as in ``shared.kernels.batch``; N = tiles of queries, G = query heads of a kv head.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend, sdpa_kernel

from shared.kernels.batch import Batch, Heads, PagedKV

#: Keys that are scored at once.
TILE_KEYS = 64
#: Most rows of a tile of queries, tokens x G; the fewest that a tensor core takes; and the fewest with which
#: it sums as it does with the most (below, Hopper's warps work alone, and round otherwise).
_TILE_ROWS, _FEWEST_ROWS, _FEWEST_ALIKE = 128, 16, 64
#: Rows without context and with so many tokens are given to torch's attention.
FRESH_TOKENS = 1024
#: First and last token (exclusive) of rows.
Spans = tuple[tuple[int, int], ...]


def rotary_store(
    qkv_TW: torch.Tensor,
    heads: Heads,
    batch: Batch,
    kv: PagedKV,
    layer: int,
    q_norm_D: torch.Tensor | None = None,
    k_norm_D: torch.Tensor | None = None,
) -> None:
    """See ``shared.kernels.attention.rotary_store``. Arithmetic in float32, rounded once. A token at a
    negative position is passed over: padding."""
    if not batch.num_tokens:
        return
    data, normed = kv.data_BKL2SD[:, :, layer], q_norm_D is not None
    _rotary_store[(batch.num_tokens, heads.num_kv_heads)](
        qkv_TW,
        q_norm_D if normed else qkv_TW,
        k_norm_D if normed else qkv_TW,
        batch.cos_TD,
        batch.sin_TD,
        batch.rows_T,
        batch.positions_T,
        data,
        kv.tables_RM,
        qkv_TW.stride(0),
        data.stride(0),
        data.stride(1),
        kv.tables_RM.stride(0),
        heads.scale,
        heads.eps,
        KV_HEADS=heads.num_kv_heads,
        GROUP=heads.num_heads // heads.num_kv_heads,
        DIM=heads.dim,
        HALF=triton.next_power_of_2(heads.dim // 2),
        BLOCK=kv.block_size,
        NORMED=normed,
        num_warps=1,
    )


@triton.jit
def _rotated(at, norm, cos, sin, half, inside, eps, scale, DIM: tl.constexpr, NORMED: tl.constexpr):
    """The two halves of one head, normed (where there is a norm), rotated and scaled, in float32."""
    a = tl.load(at + half, mask=inside, other=0).to(tl.float32)
    b = tl.load(at + DIM // 2 + half, mask=inside, other=0).to(tl.float32)
    if NORMED:
        over = tl.rsqrt(tl.sum(a * a + b * b, 0) / DIM + eps)
        a *= over * tl.load(norm + half, mask=inside, other=0).to(tl.float32)
        b *= over * tl.load(norm + DIM // 2 + half, mask=inside, other=0).to(tl.float32)
    return (a * cos - b * sin) * scale, (b * cos + a * sin) * scale


@triton.jit
def _rotary_store(
    qkv, q_norm, k_norm, cos, sin, rows, positions, data, tables,
    qkv_stride, block_stride, head_stride, table_stride, scale, eps,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """One token and one kv head a program, with the query heads of that head."""
    token, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + token)
    if position < 0:
        return
    half = tl.arange(0, HALF)
    inside = half < DIM // 2
    c = tl.load(cos + token * (DIM // 2) + half, mask=inside, other=0)
    s = tl.load(sin + token * (DIM // 2) + half, mask=inside, other=0)
    qkv += token.to(tl.int64) * qkv_stride
    for g in tl.static_range(GROUP):
        at = qkv + (head * GROUP + g) * DIM
        a, b = _rotated(at, q_norm, c, s, half, inside, eps, scale, DIM, NORMED)
        tl.store(at + half, a, mask=inside)
        tl.store(at + DIM // 2 + half, b, mask=inside)
    block = tl.load(tables + tl.load(rows + token).to(tl.int64) * table_stride + position // BLOCK)
    slot = data + block.to(tl.int64) * block_stride + head * head_stride + position % BLOCK * DIM
    at = qkv + (KV_HEADS * GROUP + head) * DIM
    a, b = _rotated(at, k_norm, c, s, half, inside, eps, 1.0, DIM, NORMED)
    tl.store(at + half, a, mask=inside)
    tl.store(at + DIM // 2 + half, b, mask=inside)
    tl.store(slot + half, a, mask=inside)
    tl.store(slot + DIM // 2 + half, b, mask=inside)
    at += KV_HEADS * DIM
    slot += BLOCK * DIM
    tl.store(slot + half, tl.load(at + half, mask=inside), mask=inside)
    tl.store(slot + DIM // 2 + half, tl.load(at + DIM // 2 + half, mask=inside), mask=inside)


def query_tiles(starts: Sequence[int], heads: Heads, fresh: Spans = ()) -> NDArray[np.int32]:
    """[N, 2]: first token and number of tokens of each tile of a batch with these ``starts``; without the
    spans of tokens that ``attention_fresh`` takes."""
    most = tokens_of_a_tile(heads)
    runs = [run for run in pairwise(starts) if run not in fresh]
    tiles = [(at, min(most, last - at)) for first, last in runs for at in range(first, last, most)]
    return np.array(tiles, np.int32).reshape(-1, 2)


def fresh_spans(starts: Sequence[int], firsts: Sequence[int], kv: Sequence[PagedKV]) -> Spans:
    """The rows that have no context yet, and tokens enough that attention over contiguous keys pays."""
    window = min((group.window for group in kv if group.window is not None), default=None)
    return tuple(
        (start, stop)
        for first, (start, stop) in zip(firsts, pairwise(starts), strict=True)
        if first == 0 and stop - start >= FRESH_TOKENS and (window is None or stop - start <= window)
    )


def attention_fresh(qkv_TW: torch.Tensor, heads: Heads, spans: Spans, out_TW: torch.Tensor) -> None:
    """``attention`` of rows without context, by torch's own kernels: they read the step's keys and values
    where those were made instead of from blocks. Rounded otherwise than ``attention``."""
    q_THD, k_TKD, v_TKD = qkv_TW.unflatten(1, (-1, heads.dim)).split(
        (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads), dim=1
    )
    for start, stop in spans:
        q, k, v = (x[start:stop].transpose(0, 1)[None] for x in (q_THD, k_TKD, v_TKD))
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], True):
            mixed = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=1.0, enable_gqa=True
            )
        out_TW[start:stop] = mixed[0].transpose(0, 1).flatten(1)


def tokens_of_a_tile(heads: Heads) -> int:
    """Tokens that one program of ``attention`` takes at most."""
    group: int = triton.next_power_of_2(heads.num_heads // heads.num_kv_heads)
    return max(1, _TILE_ROWS // group)


def attention(
    qkv_TW: torch.Tensor,
    heads: Heads,
    batch: Batch,
    kv: PagedKV,
    layer: int,
    tiles_N2: torch.Tensor,
    *,
    soft_cap: float = 0.0,
    alike: bool = False,
) -> torch.Tensor:
    """See ``shared.kernels.attention.attention``. ``tiles_N2``: ``query_tiles`` of ``batch.starts``,
    on the device. ``soft_cap`` > 0: scores are ``cap * tanh(score / cap)`` (Gemma 2). ``alike``: a
    token has the same bits in a step of its own as in a long one."""
    out = torch.empty(batch.num_tokens, heads.num_heads * heads.dim, dtype=qkv_TW.dtype, device=qkv_TW.device)
    if not len(tiles_N2):
        return out
    data = kv.data_BKL2SD[:, :, layer]
    group = triton.next_power_of_2(heads.num_heads // heads.num_kv_heads)
    longest = max(b - a for a, b in zip(batch.starts, batch.starts[1:], strict=False))
    fewest = _FEWEST_ALIKE if alike else _FEWEST_ROWS
    rows = max(fewest, group * triton.next_power_of_2(min(longest, tokens_of_a_tile(heads))))
    _attention[(len(tiles_N2), heads.num_kv_heads)](
        qkv_TW,
        out,
        data,
        kv.tables_RM,
        batch.rows_T,
        batch.positions_T,
        tiles_N2,
        qkv_TW.stride(0),
        out.stride(0),
        data.stride(0),
        data.stride(1),
        kv.tables_RM.stride(0),
        soft_cap,
        kv.window or 0,
        GROUP=heads.num_heads // heads.num_kv_heads,
        PACK=group,
        ROWS=rows,
        DIM=heads.dim,
        DIMS=triton.next_power_of_2(heads.dim),
        BLOCK=kv.block_size,
        KEYS=TILE_KEYS,
        WINDOWED=kv.window is not None,
        CAPPED=soft_cap > 0,
        num_warps=8 if rows >= _TILE_ROWS else 4,
        num_stages=3,
    )
    return out


@triton.jit
def _scored(
    q_MD, keys, values, tables, first_key, at_M, stop, block_stride, soft_cap, window,
    peak_M, mass_M, mixed_MD, DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys more (Milakov and Gimelshein, 2018). Peaks are in units of log 2."""
    at_N = first_key + tl.arange(0, KEYS)
    dim = tl.arange(0, DIMS)
    there = (at_N < stop)[:, None] & (dim < DIM)[None, :]
    block_N = tl.load(tables + at_N // BLOCK, mask=at_N < stop, other=0).to(tl.int64)
    slot_ND = (block_N * block_stride + at_N % BLOCK * DIM)[:, None] + dim[None, :]
    k_ND = tl.load(keys + slot_ND, mask=there, other=0)
    v_ND = tl.load(values + slot_ND, mask=there, other=0)
    score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
    if CAPPED:
        score_MN = soft_cap * (1 - 2 / (1 + tl.exp(2 * score_MN / soft_cap)))
    if MASKED:
        visible = at_N[None, :] <= at_M[:, None]
        if WINDOWED:
            visible &= at_N[None, :] > at_M[:, None] - window
        score_MN = tl.where(visible, score_MN, float("-inf"))
    new_M = tl.maximum(peak_M, tl.max(score_MN, 1) * 1.4426950408889634)
    # Written out, so that it is rounded alike with and without a mask.
    log2e = tl.full([1, 1], 1.4426950408889634, tl.float32)
    weight_MN = tl.exp2(tl.fma(score_MN, log2e, -new_M[:, None]))
    shrink_M = tl.exp2(peak_M - new_M)
    mixed_MD = mixed_MD * shrink_M[:, None]
    mixed_MD = tl.dot(weight_MN.to(v_ND.dtype), v_ND, mixed_MD, input_precision="ieee")
    return new_M, mass_M * shrink_M + tl.sum(weight_MN, 1), mixed_MD


@triton.jit
def _attention(
    qkv, out, data, tables, rows, positions, tiles,
    qkv_stride, out_stride, block_stride, head_stride, table_stride, soft_cap, window,
    GROUP: tl.constexpr, PACK: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """One tile of queries and one kv head a program. Row m is token m // PACK, query head m % PACK."""
    # Long contexts first: what is left at the end are short ones.
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    first, count = tl.load(tiles + tile * 2), tl.load(tiles + tile * 2 + 1)
    token_M, group_M = tl.arange(0, ROWS) // PACK, tl.arange(0, ROWS) % PACK
    used_M = (token_M < count) & (group_M < GROUP)
    start = tl.load(positions + first)
    if start < 0:
        return
    at_M = start + tl.minimum(token_M, count - 1)
    stop = start + count
    dim = tl.arange(0, DIMS)
    used_MD = used_M[:, None] & (dim < DIM)[None, :]
    head_M = head * GROUP + group_M
    q_MD = tl.load(
        qkv + ((first + token_M).to(tl.int64) * qkv_stride + head_M * DIM)[:, None] + dim[None, :],
        mask=used_MD,
        other=0,
    )
    tables += tl.load(rows + first).to(tl.int64) * table_stride
    keys = data + head * head_stride
    values = keys + BLOCK * DIM
    peak_M = tl.full([ROWS], -1.0e30, tl.float32)
    mass_M = tl.zeros([ROWS], tl.float32)
    mixed_MD = tl.zeros([ROWS, DIMS], tl.float32)
    low = 0
    if WINDOWED:
        low = tl.maximum(start - window + 1, 0) // KEYS * KEYS
    else:
        # Whole tiles that every query sees need no mask.
        whole = (start + 1) // KEYS * KEYS
        for key in range(0, whole, KEYS):
            peak_M, mass_M, mixed_MD = _scored(
                q_MD, keys, values, tables, key, at_M, stop, block_stride, soft_cap, window,
                peak_M, mass_M, mixed_MD, DIM, DIMS, BLOCK, KEYS, WINDOWED, CAPPED, False,
            )  # fmt: skip
        low = whole
    for key in range(low, stop, KEYS):
        peak_M, mass_M, mixed_MD = _scored(
            q_MD, keys, values, tables, key, at_M, stop, block_stride, soft_cap, window,
            peak_M, mass_M, mixed_MD, DIM, DIMS, BLOCK, KEYS, WINDOWED, CAPPED, True,
        )  # fmt: skip
    place_MD = ((first + token_M).to(tl.int64) * out_stride + head_M * DIM)[:, None] + dim[None, :]
    tl.store(out + place_MD, mixed_MD / mass_M[:, None], mask=used_MD)
