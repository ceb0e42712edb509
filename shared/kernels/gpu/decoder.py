"""All layers of a dense decoder on a GPU: cuBLAS for the products, our kernels between them.

The call of ``shared.kernels.decoder.DecoderLayers``, whose twin is the reference. Here the stream ends in
the norm before the output matrix, since a norm is made where the stream is added to.
Shapes as in ``shared.kernels.batch``; E = hidden features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shared.kernels.batch import Batch, Heads, PagedKV
from shared.kernels.decoder import LayerWeights
from shared.kernels.gpu.attention import attention, rotary_store
from shared.kernels.gpu.pointwise import add_norm, norm, silu_mul


class GpuDecoderLayers:
    """The layers bound to their weights and to the paged memory; both must outlive it. ``norm_E`` is the
    last norm. Nothing is waited for."""

    def __init__(
        self, layers: Sequence[LayerWeights], norm_E: torch.Tensor, groups: Sequence[PagedKV], heads: Heads
    ) -> None:
        self._layers = tuple(layers)
        self._groups = tuple(groups)
        self._heads = heads
        self._norms = [*(layer.attn_norm_E for layer in layers), norm_E]

    def __call__(self, x_TE: torch.Tensor, batch: Batch, tiles_N2: torch.Tensor) -> torch.Tensor:
        """Run all layers over ``x_TE``, which is spent; returns the normed stream [T, E]. ``tiles_N2``: the
        batch's ``query_tiles``, on the device."""
        heads = self._heads
        normed_TE = norm(x_TE, self._norms[0], heads.eps)
        for layer, next_norm_E in zip(self._layers, self._norms[1:], strict=True):
            kv = self._groups[layer.group]
            qkv_TW = linear(normed_TE, layer.qkv_WE, layer.qkv_bias_W)
            rotary_store(qkv_TW, heads, batch, kv, layer.index, layer.q_norm_D, layer.k_norm_D)
            mixed = attention(qkv_TW, heads, batch, kv, layer.index, tiles_N2)
            delta_TE = linear(mixed, layer.o_EW, layer.o_bias_E)
            normed_TE = add_norm(delta_TE, x_TE, layer.mlp_norm_E, heads.eps)
            gate_up = linear(normed_TE, layer.gate_up_2IE, layer.gate_up_bias_2I)
            delta_TE = linear(silu_mul(gate_up), layer.down_EI, layer.down_bias_E)
            normed_TE = add_norm(delta_TE, x_TE, next_norm_E, heads.eps)
        return normed_TE


def linear(x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``, [T, N], in the type of ``x``."""
    return torch.nn.functional.linear(x_TK, weight_NK, bias_N)
