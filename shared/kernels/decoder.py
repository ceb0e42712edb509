"""All layers of a dense decoder in one call: the compiled kernels walk them without coming back to
Python, so a step takes the interpreter lock once.

Shapes as in ``shared.kernels.batch``; E = hidden features, I = intermediate features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from shared.kernels import records
from shared.kernels.activation import silu_mul_twin
from shared.kernels.attention import attention_twin, rotary_store_twin
from shared.kernels.batch import LANES, Batch, Heads, PagedKV, fits_native, pointer
from shared.kernels.library import library
from shared.kernels.linear import Weight, linear_twin, matrix
from shared.kernels.norm import rms_norm_twin

W = TypeVar("W", bound=Weight, covariant=True)


@dataclass(frozen=True)
class LayerWeights(Generic[W]):
    """One layer's tensors, contiguous. Projections are float32, bfloat16 or quantized; the rest is float32.

    ``group`` is the layer's KV group and ``index`` its place inside it.
    """

    attn_norm_E: torch.Tensor
    qkv_WE: W
    o_EW: W
    mlp_norm_E: torch.Tensor
    gate_up_2IE: W
    down_EI: W
    qkv_bias_W: torch.Tensor | None = None
    o_bias_E: torch.Tensor | None = None
    gate_up_bias_2I: torch.Tensor | None = None
    down_bias_E: torch.Tensor | None = None
    q_norm_D: torch.Tensor | None = None
    k_norm_D: torch.Tensor | None = None
    group: int = 0
    index: int = 0

    @property
    def record(self) -> records.Layer:
        return records.Layer(
            matrix(self.qkv_WE, self.qkv_bias_W),
            matrix(self.o_EW, self.o_bias_E),
            matrix(self.gate_up_2IE, self.gate_up_bias_2I),
            matrix(self.down_EI, self.down_bias_E),
            pointer(self.attn_norm_E),
            pointer(self.mlp_norm_E),
            pointer(self.q_norm_D),
            pointer(self.k_norm_D),
            self.group,
            self.index,
        )


class DecoderLayers:
    """The layers bound to their weights and to the paged memory; both must outlive it.

    One step at a time: it owns the step's intermediate memory, grown to the largest step seen.
    """

    def __init__(
        self, layers: Sequence[LayerWeights[Weight]], groups: Sequence[PagedKV], heads: Heads
    ) -> None:
        self._layers = tuple(layers)
        self._groups = tuple(groups)
        self._heads = heads
        hidden, inputs = self._layers[0].down_EI.shape
        self._widths = (hidden, heads.qkv_width, heads.num_heads * heads.dim, 2 * inputs, inputs)
        self._space: tuple[torch.Tensor, ...] = ()
        layer_records = (records.Layer * len(self._layers))(*(layer.record for layer in self._layers))
        group_records = (records.KVGroup * len(self._groups))(*(group.record for group in self._groups))
        self._record = records.Model(layer_records, group_records, heads.record, len(self._layers), hidden)
        fits = all(fits_native(heads, group.block_size) for group in self._groups)
        self._native = library() is not None and fits and not any(w % LANES for w in self._widths)

    @property
    def batch_invariant(self) -> bool:
        """Whether a token's result is the same bits alone, batched and chunked."""
        return self._native

    def __call__(self, x_TE: torch.Tensor, batch: Batch) -> None:
        """Run all layers on ``x_TE`` in place, writing the step's K and V."""
        lib = library() if self._native else None
        if lib is None:
            return self.twin(x_TE, batch)
        lib.triptych_decoder(x_TE.data_ptr(), self._record, batch.record, self._workspace(batch.num_tokens))
        return None

    def twin(self, x_TE: torch.Tensor, batch: Batch) -> None:
        """Torch reference of the call."""
        eps = self._heads.eps
        for layer in self._layers:
            normed_TE = rms_norm_twin(x_TE, layer.attn_norm_E, eps)
            qkv_TW = linear_twin(normed_TE, layer.qkv_WE, layer.qkv_bias_W)
            kv = self._groups[layer.group]
            rotary_store_twin(qkv_TW, self._heads, batch, kv, layer.index, layer.q_norm_D, layer.k_norm_D)
            mixed = attention_twin(qkv_TW, self._heads, batch, kv, layer.index)
            x_TE += linear_twin(mixed, layer.o_EW, layer.o_bias_E)
            normed_TE = rms_norm_twin(x_TE, layer.mlp_norm_E, eps)
            gate_up = linear_twin(normed_TE, layer.gate_up_2IE, layer.gate_up_bias_2I)
            x_TE += linear_twin(silu_mul_twin(gate_up), layer.down_EI, layer.down_bias_E)

    def _workspace(self, num_tokens: int) -> records.Workspace:
        if not self._space or self._space[0].shape[0] < num_tokens:
            self._space = tuple(torch.empty(num_tokens, width) for width in self._widths)
        return records.Workspace(*(tensor.data_ptr() for tensor in self._space))
