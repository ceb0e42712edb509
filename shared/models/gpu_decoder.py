"""A dense decoder on a GPU, from token ids to logits, without waiting for the host.

Owns the binding of configuration, weights and paged memory there, and where weights live. Owns no rows, no
sampling and no policy. Shapes: T = tokens, S = sampled positions, E = hidden features, V = valid tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from shared.kernels.batch import Batch, Heads, PagedKV
from shared.kernels.decoder import LayerWeights
from shared.kernels.gpu.decoder import GpuDecoderLayers, linear
from shared.kernels.gpu.tokens import embed
from shared.layers.rotary import RotaryEmbedding
from shared.models.config import ModelConfig
from shared.models.decoder import frequencies_of
from shared.models.weights import DecoderWeights


class GpuDecoder:
    """A decoder over weights and paged KV memory of one device; both must outlive it."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, groups: Sequence[PagedKV]) -> None:
        heads = Heads(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            scale=config.head_dim**-0.5,
            eps=config.rms_norm_eps,
        )
        self._embed_VE, self._head_VE = weights.embed_VE, weights.head_VE
        self._layers = GpuDecoderLayers(weights.layers, weights.norm_E, groups, heads)
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
    ) -> torch.Tensor:
        """Run all layers, storing the step's KV; returns what ``logits`` takes. ``x_TE`` is spent. Tokens at
        negative positions are padding: what is returned for them means nothing."""
        places_T = positions_T.clamp(min=0).long()
        batch = Batch(rows_T, positions_T, starts, self._cos_PD[places_T], self._sin_PD[places_T])
        return self._layers(x_TE, batch, tiles_N2)

    def logits(self, normed_SE: torch.Tensor) -> torch.Tensor:
        """Logits [S, V] of rows taken from ``forward``'s result."""
        return linear(normed_SE, self._head_VE)


def place(weights: DecoderWeights, device: torch.device, dtype: torch.dtype) -> DecoderWeights:
    """The weights on ``device``: matrices and biases in ``dtype``, norms in float32. Tied ones stay one."""

    def moved(tensor: torch.Tensor, *, norm: bool = False) -> torch.Tensor:
        return tensor.to(device, torch.float32 if norm else dtype)

    def layer(one: LayerWeights) -> LayerWeights:
        tensors: dict[str, Any] = {
            field.name: moved(value, norm="norm" in field.name)
            for field in dataclasses.fields(one)
            if isinstance(value := getattr(one, field.name), torch.Tensor)
        }
        return dataclasses.replace(one, **tensors)

    embed_VE = moved(weights.embed_VE)
    tied = weights.head_VE.data_ptr() == weights.embed_VE.data_ptr()
    head_VE = embed_VE[: len(weights.head_VE)] if tied else moved(weights.head_VE)
    layers = tuple(map(layer, weights.layers))
    return DecoderWeights(embed_VE, head_VE, moved(weights.norm_E, norm=True), layers)
