"""The dense decoder: Llama, SmolLM2, Mistral, Qwen2 and Qwen3 are one definition with settings.

Owns the binding of configuration, weights and paged memory. Owns no rows and no sampling.
Shapes: T = tokens, R = sampled positions, E = hidden features, V = valid tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shared.kernels.batch import Batch, Heads, PagedKV
from shared.kernels.decoder import DecoderLayers
from shared.kernels.linear import Weight
from shared.layers.rotary import RotaryEmbedding, frequencies, stretch_long_waves
from shared.layers.vocabulary import Vocabulary
from shared.models.config import ModelConfig
from shared.models.weights import DecoderWeights


class Decoder:
    """A decoder over borrowed weights and paged KV memory. One step at a time, in one thread."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights[Weight], groups: Sequence[PagedKV]
    ) -> None:
        heads = Heads(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            scale=config.head_dim**-0.5,
            eps=config.rms_norm_eps,
        )
        self._layers = DecoderLayers(weights.layers, groups, heads)
        self._vocabulary = Vocabulary(weights.embed_VE, weights.head_VE, weights.norm_E, config.rms_norm_eps)
        self._rotary = RotaryEmbedding(frequencies_of(config))

    @property
    def batch_invariant(self) -> bool:
        """Whether a token's result is the same bits alone, batched and chunked."""
        return self._layers.batch_invariant

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Token embeddings [T, E]; the caller may overwrite placeholder rows."""
        return self._vocabulary.embed(token_ids_T)

    def forward(
        self, x_TE: torch.Tensor, rows_T: torch.Tensor, positions_T: torch.Tensor, starts: tuple[int, ...]
    ) -> None:
        """Run all layers on ``x_TE`` in place and store the step's KV. ``rows_T`` and ``positions_T``
        are int32; ``starts`` as in ``Batch``."""
        cos_TD, sin_TD = self._rotary(positions_T)
        self._layers(x_TE, Batch(rows_T, positions_T, starts, cos_TD, sin_TD))

    def logits(self, x_RE: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of rows taken from ``forward``'s result."""
        return self._vocabulary.logits(x_RE)


def frequencies_of(config: ModelConfig) -> torch.Tensor:
    """Angle per position of each pair of a head, scaled as configured; [half of the head dimension]."""
    rope, freq_D = config.rope, frequencies(config.head_dim, config.rope.theta)
    if rope.kind == "linear":
        return freq_D / rope.factor
    if rope.kind == "llama3":
        return stretch_long_waves(
            freq_D, rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position
        )
    return freq_D
