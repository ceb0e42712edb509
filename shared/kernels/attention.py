"""Rotary embedding with the KV write, and paged attention for a whole mixed batch.

A batch mixes decode tokens and prefill chunks freely; both calls see it as a list of tokens.
Shapes as in ``shared.kernels.batch``; C = tokens of one row's context, G = query heads of a kv head.
"""

from __future__ import annotations

import torch

from shared.kernels.batch import Batch, Heads, PagedKV, fits_native, pointer
from shared.kernels.library import library
from shared.kernels.norm import rms_norm_twin


def rotary_store(
    qkv_TW: torch.Tensor,
    heads: Heads,
    batch: Batch,
    kv: PagedKV,
    layer: int,
    q_norm_D: torch.Tensor | None = None,
    k_norm_D: torch.Tensor | None = None,
) -> None:
    """In place: norm (where given) and rotate queries and keys, scale queries by ``heads.scale``,
    and write keys and values to their slots of ``kv``. ``layer`` counts inside the group."""
    lib = library()
    if lib is None or not fits_native(heads, kv.block_size):
        return rotary_store_twin(qkv_TW, heads, batch, kv, layer, q_norm_D, k_norm_D)
    lib.triptych_rotary_store(
        qkv_TW.data_ptr(),
        pointer(q_norm_D),
        pointer(k_norm_D),
        heads.record,
        batch.record,
        kv.record,
        layer,
    )
    return None


def rotary_store_twin(
    qkv_TW: torch.Tensor,
    heads: Heads,
    batch: Batch,
    kv: PagedKV,
    layer: int,
    q_norm_D: torch.Tensor | None = None,
    k_norm_D: torch.Tensor | None = None,
) -> None:
    """Torch reference of ``rotary_store``."""
    q_THD, k_TKD, v_TKD = _split(qkv_TW, heads)
    for x, norm_D, scale in ((q_THD, q_norm_D, heads.scale), (k_TKD, k_norm_D, 1.0)):
        normed = x.clone() if norm_D is None else rms_norm_twin(x, norm_D, heads.eps)
        x.copy_(_rotate(normed, batch.cos_TD, batch.sin_TD) * scale)
    positions_T = batch.positions_T.long()
    blocks_T = kv.tables_RM[batch.rows_T.long(), positions_T // kv.block_size].long()
    slots_T = positions_T % kv.block_size
    kv.data_BKL2SD[blocks_T, :, layer, 0, slots_T] = k_TKD
    kv.data_BKL2SD[blocks_T, :, layer, 1, slots_T] = v_TKD


def attention(qkv_TW: torch.Tensor, heads: Heads, batch: Batch, kv: PagedKV, layer: int) -> torch.Tensor:
    """Each token attends to its row's positions up to its own (inside the window): new rows
    [T, H * D]. Queries are rotated and scaled; the step's own K and V are already stored.

    Compiled, a token's bits depend on its own query and its row's KV alone.
    """
    lib = library()
    if lib is None or not fits_native(heads, kv.block_size):
        return attention_twin(qkv_TW, heads, batch, kv, layer)
    out = torch.empty(batch.num_tokens, heads.num_heads * heads.dim)
    lib.triptych_attention(out.data_ptr(), qkv_TW.data_ptr(), heads.record, batch.record, kv.record, layer)
    return out


def attention_twin(qkv_TW: torch.Tensor, heads: Heads, batch: Batch, kv: PagedKV, layer: int) -> torch.Tensor:
    """Torch reference of ``attention``: one row after the other."""
    q_THD = _split(qkv_TW, heads)[0]
    out_THD = torch.empty(q_THD.shape)
    for first, last in zip(batch.starts, batch.starts[1:], strict=False):
        positions = batch.positions_T[first:last].long()
        end = int(positions[-1]) + 1
        table = kv.tables_RM[int(batch.rows_T[first]), : -(-end // kv.block_size)].long()
        # Blocks that a window has left behind may be gone, and unread slots may hold anything.
        blocks = kv.data_BKL2SD[table, :, layer].permute(2, 1, 0, 3, 4).flatten(2, 3)
        k_KCD, v_KCD = blocks[:, :, :end]
        context = torch.arange(end)
        visible = context <= positions[:, None]
        if kv.window is not None:
            visible &= context > positions[:, None] - kv.window
        used = visible.any(0)[:, None]
        k_KCD, v_KCD = k_KCD.where(used, 0.0), v_KCD.where(used, 0.0)
        q_KGTD = q_THD[first:last].transpose(0, 1).unflatten(0, (heads.num_kv_heads, -1))
        scores = (q_KGTD @ k_KCD[:, None].transpose(-1, -2)).masked_fill(~visible, -torch.inf)
        mixed_KGTD = torch.softmax(scores, -1) @ v_KCD[:, None]
        out_THD[first:last] = mixed_KGTD.flatten(0, 1).transpose(0, 1)
    return out_THD.flatten(1)


def _split(qkv_TW: torch.Tensor, heads: Heads) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of queries, keys and values, [T, heads, D] each."""
    x = qkv_TW.unflatten(1, (-1, heads.dim))
    q, k, v = x.split((heads.num_heads, heads.num_kv_heads, heads.num_kv_heads), dim=1)
    return q, k, v


def _rotate(x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """Rotary embedding on the two halves of D (Su et al., 2021, in the half-split layout)."""
    a, b = x_THD.chunk(2, dim=-1)
    cos, sin = cos_TD[:, None], sin_TD[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
