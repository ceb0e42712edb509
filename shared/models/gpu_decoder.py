"""A dense decoder on a GPU, from token ids to logits, without waiting for the host.

Owns the binding of configuration, weights and paged memory there, and where weights live. Owns no rows, no
sampling and no policy. Shapes: T = tokens, S = sampled positions, E = hidden features, V = valid tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from shared.kernels.batch import Batch, Heads, PagedKV
from shared.kernels.decoder import LayerWeights
from shared.kernels.gpu.attention import Spans
from shared.kernels.gpu.decode import LARGE_BATCH, DecodeLayers, plan_for
from shared.kernels.gpu.decode_attention import DecodeAttention
from shared.kernels.gpu.decoder import GpuDecoderLayers, attend_any, attend_one
from shared.kernels.gpu.linear import Invariant, Linear, fastest
from shared.kernels.gpu.matmul import Scratch
from shared.kernels.gpu.tokens import embed, likeliest
from shared.layers.rotary import RotaryEmbedding
from shared.models.config import ModelConfig
from shared.models.decoder import frequencies_of
from shared.models.weights import DecoderWeights


class DecodeStep(Protocol):
    """Token ids, rows and positions, int32 [B] each, and the last tokens of all rows -> logits [B, V] and
    the likeliest tokens [B], which ``last_R`` gets too. Ids as in ``kernels.gpu.tokens.embed``; a row at
    position -1 is padding. Captured or called again, what it returned before is void."""

    def __call__(
        self, token_ids_B: torch.Tensor, rows_B: torch.Tensor, positions_B: torch.Tensor, last_R: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class GpuDecoder:
    """A decoder over weights and paged KV memory of one device; both must outlive it.

    ``batch_invariant``: a token's logits are the same bits alone, in any batch, however its prompt is cut
    into steps, and computed again. It costs the fused kernels of decode steps.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights[torch.Tensor],
        groups: Sequence[PagedKV],
        *,
        batch_invariant: bool = False,
    ) -> None:
        heads = Heads(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            scale=config.head_dim**-0.5,
            eps=config.rms_norm_eps,
        )
        self._weights, self._groups, self._heads = weights, tuple(groups), heads
        self._embed_VE, self._head_VE = weights.embed_VE, weights.head_VE
        self.batch_invariant = batch_invariant
        self._linear: Linear = Invariant() if batch_invariant else fastest
        self._scratch = Scratch(weights.embed_VE.device)
        self._layers = GpuDecoderLayers(weights.layers, weights.norm_E, groups, heads.eps, self._linear)
        device = weights.embed_VE.device
        # The angles of every position, once: a step looks up its own.
        positions = torch.arange(config.max_position, device=device)
        self._cos_PD, self._sin_PD = RotaryEmbedding(frequencies_of(config).to(device))(positions)

    def embed(self, token_ids_T: torch.Tensor, rows_T: torch.Tensor, last_R: torch.Tensor) -> torch.Tensor:
        """See ``shared.kernels.gpu.tokens.embed``; the caller may overwrite placeholder rows."""
        return embed(token_ids_T, rows_T, last_R, self._embed_VE)

    def forward(
        self,
        x_TE: torch.Tensor,
        rows_T: torch.Tensor,
        positions_T: torch.Tensor,
        starts: tuple[int, ...],
        tiles_N2: torch.Tensor,
        fresh: Spans = (),
    ) -> torch.Tensor:
        """Run all layers, storing the step's KV; returns what ``logits`` takes. ``x_TE`` is spent. Tokens at
        negative positions are padding: what is returned for them means nothing."""
        places_T = positions_T.clamp(min=0).long()
        batch = Batch(rows_T, positions_T, starts, self._cos_PD[places_T], self._sin_PD[places_T])
        return self._layers(x_TE, attend_any(self._heads, batch, tiles_N2, fresh, alike=self.batch_invariant))

    def forward_one(
        self, x_BE: torch.Tensor, rows_B: torch.Tensor, positions_B: torch.Tensor, kernel: DecodeAttention
    ) -> torch.Tensor:
        """As ``forward``, where every row has one token."""
        return self._layers(x_BE, attend_one(kernel, rows_B, positions_B, (self._cos_PD, self._sin_PD)))

    def decode_step(self, num_rows: int) -> DecodeStep:
        """A whole step in which ``num_rows`` rows have one token each, its memory included."""
        weights, heads, groups = self._weights, self._heads, self._groups
        if self.batch_invariant:
            return _GeneralStep(self, num_rows)
        plan = plan_for(num_rows, weights.layers, weights.head_VE, heads, groups)
        if plan is None and all(DecodeAttention.fits(heads, group) for group in groups):
            kernel = DecodeAttention(LARGE_BATCH, heads, num_rows, weights.embed_VE.device)
            return _LargeStep(self, kernel)
        if plan is None:
            return _GeneralStep(self, num_rows)
        return DecodeLayers(
            plan,
            num_rows,
            weights.layers,
            weights.embed_VE,
            weights.head_VE,
            weights.norm_E,
            groups,
            heads,
            (self._cos_PD, self._sin_PD),
            self._scratch,
        )

    def logits(self, normed_SE: torch.Tensor) -> torch.Tensor:
        """Logits [S, V] of rows taken from ``forward``'s result."""
        return self._linear(normed_SE, self._head_VE)


class _LargeStep:
    """A decode step whose products are cuBLAS's: there are so many rows that it does not wait for weights."""

    def __init__(self, decoder: GpuDecoder, kernel: DecodeAttention) -> None:
        self._decoder, self._kernel = decoder, kernel

    def __call__(
        self, token_ids_B: torch.Tensor, rows_B: torch.Tensor, positions_B: torch.Tensor, last_R: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x_BE = self._decoder.embed(token_ids_B, rows_B, last_R)
        normed_BE = self._decoder.forward_one(x_BE, rows_B, positions_B, self._kernel)
        logits_BV = self._decoder.logits(normed_BE)
        return logits_BV, likeliest(logits_BV, rows_B, last_R)


class _GeneralStep:
    """A decode step by the kernels of any step."""

    def __init__(self, decoder: GpuDecoder, num_rows: int) -> None:
        self._decoder = decoder
        self._starts = tuple(range(num_rows + 1))
        tiles = torch.stack((torch.arange(num_rows), torch.ones(num_rows, dtype=torch.int64)), 1)
        self._tiles_B2 = tiles.int().to(decoder._embed_VE.device)

    def __call__(
        self, token_ids_B: torch.Tensor, rows_B: torch.Tensor, positions_B: torch.Tensor, last_R: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x_BE = self._decoder.embed(token_ids_B, rows_B, last_R)
        normed_BE = self._decoder.forward(x_BE, rows_B, positions_B, self._starts, self._tiles_B2)
        logits_BV = self._decoder.logits(normed_BE)
        return logits_BV, likeliest(logits_BV, rows_B, last_R)


def place(
    weights: DecoderWeights[torch.Tensor], device: torch.device, dtype: torch.dtype
) -> DecoderWeights[torch.Tensor]:
    """The weights on ``device``: matrices and biases in ``dtype``, norms in float32; gate and up pair by
    pair. Tied ones stay one."""

    def moved(tensor: torch.Tensor, *, norm: bool = False) -> torch.Tensor:
        return tensor.to(device, torch.float32 if norm else dtype)

    def layer(one: LayerWeights[torch.Tensor]) -> LayerWeights[torch.Tensor]:
        tensors: dict[str, Any] = {
            field.name: moved(value, norm="norm" in field.name)
            for field in dataclasses.fields(one)
            if isinstance(value := getattr(one, field.name), torch.Tensor)
        }
        for name in ("gate_up_2IE", "gate_up_bias_2I"):
            if name in tensors:  # pair by pair, so that a tile of a product has both of each
                tensors[name] = torch.stack(tensors[name].chunk(2), 1).flatten(0, 1).contiguous()
        return dataclasses.replace(one, **tensors)

    embed_VE = moved(weights.embed_VE)
    tied = weights.head_VE.data_ptr() == weights.embed_VE.data_ptr()
    head_VE = embed_VE[: len(weights.head_VE)] if tied else moved(weights.head_VE)
    layers = tuple(map(layer, weights.layers))
    return DecoderWeights(embed_VE, head_VE, moved(weights.norm_E, norm=True), layers)
