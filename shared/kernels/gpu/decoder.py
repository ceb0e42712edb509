"""All layers of a dense decoder on a GPU: products as they are given, our kernels between them.

The call of ``shared.kernels.decoder.DecoderLayers``, whose twin is the reference. Here the stream ends in
the norm before the output matrix, since a norm is made where the stream is added to.
Shapes as in ``shared.kernels.batch``; E = hidden features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shared.kernels.batch import Batch, Heads, PagedKV
from shared.kernels.decoder import LayerWeights
from shared.kernels.gpu.attention import Spans, attention, attention_fresh, rotary_store
from shared.kernels.gpu.decode_attention import DecodeAttention
from shared.kernels.gpu.linear import Linear, fastest
from shared.kernels.gpu.pointwise import add_norm, norm, silu_mul

#: Rotates a layer's queries and keys, writes its K and V, and attends: qkv [T, W] -> [T, H * D].
Attend = Callable[[torch.Tensor, LayerWeights[torch.Tensor], PagedKV], torch.Tensor]


def attend_any(
    heads: Heads, batch: Batch, tiles_N2: torch.Tensor, fresh: Spans = (), *, alike: bool = False
) -> Attend:
    """For any step. ``tiles_N2`` are its ``query_tiles``, on the device, without the ``fresh_spans``."""

    def attend(qkv_TW: torch.Tensor, layer: LayerWeights[torch.Tensor], kv: PagedKV) -> torch.Tensor:
        rotary_store(qkv_TW, heads, batch, kv, layer.index, layer.q_norm_D, layer.k_norm_D)
        out = attention(qkv_TW, heads, batch, kv, layer.index, tiles_N2, alike=alike)
        if fresh:
            attention_fresh(qkv_TW, heads, fresh, out)
        return out

    return attend


def attend_one(
    kernel: DecodeAttention,
    rows_B: torch.Tensor,
    positions_B: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
) -> Attend:
    """For a step in which every row has one token; ``angles`` are those of every position."""

    def attend(qkv_BW: torch.Tensor, layer: LayerWeights[torch.Tensor], kv: PagedKV) -> torch.Tensor:
        out_BW = torch.empty(len(qkv_BW), layer.o_EW.shape[1], dtype=qkv_BW.dtype, device=qkv_BW.device)
        kernel(qkv_BW, out_BW, kv, layer.index, rows_B, positions_B, *angles, layer.q_norm_D, layer.k_norm_D)
        return out_BW

    return attend


class GpuDecoderLayers:
    """The layers bound to their weights and to the paged memory; both must outlive it. Rows of
    ``gate_up_2IE`` stand pair by pair: gate, up. ``norm_E`` is the last norm. Nothing is waited for."""

    def __init__(
        self,
        layers: Sequence[LayerWeights[torch.Tensor]],
        norm_E: torch.Tensor,
        groups: Sequence[PagedKV],
        eps: float,
        linear: Linear = fastest,
    ) -> None:
        self._layers = tuple(layers)
        self._groups = tuple(groups)
        self._eps = eps
        self._linear = linear
        self._norms = [*(layer.attn_norm_E for layer in layers), norm_E]

    def __call__(self, x_TE: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Run all layers over ``x_TE``, which is spent; returns the normed stream [T, E]."""
        eps, linear = self._eps, self._linear
        normed_TE = norm(x_TE, self._norms[0], eps)
        for layer, next_norm_E in zip(self._layers, self._norms[1:], strict=True):
            qkv_TW = linear(normed_TE, layer.qkv_WE, layer.qkv_bias_W)
            delta_TE = linear(attend(qkv_TW, layer, self._groups[layer.group]), layer.o_EW, layer.o_bias_E)
            normed_TE = add_norm(delta_TE, x_TE, layer.mlp_norm_E, eps)
            gate_up = linear(normed_TE, layer.gate_up_2IE, layer.gate_up_bias_2I)
            delta_TE = linear(silu_mul(gate_up), layer.down_EI, layer.down_bias_E)
            normed_TE = add_norm(delta_TE, x_TE, next_norm_E, eps)
        return normed_TE
