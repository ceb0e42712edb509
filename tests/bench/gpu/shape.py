"""The 8B shape that everything here is measured on: Qwen3-8B's sizes, random bfloat16 weights."""

from __future__ import annotations

import math

import torch

from shared.kernels.decoder import LayerWeights
from shared.models.config import ModelConfig, RopeConfig
from shared.models.weights import DecoderWeights

QWEN3_8B = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=151936,
    num_valid_tokens=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1_000_000.0),
    max_position=40960,
    tie_embeddings=False,
    qk_norm=True,
)


def random_weights(config: ModelConfig) -> DecoderWeights[torch.Tensor]:
    """On the GPU, bfloat16, norms in float32."""
    e, i, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, w = config.num_heads * d, (config.num_heads + 2 * config.num_kv_heads) * d

    def matrix(rows: int, columns: int) -> torch.Tensor:
        out = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
        return out.normal_(0, 0.7 / math.sqrt(columns))

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(size, device="cuda")

    layers = tuple(
        LayerWeights(
            norm(e), matrix(w, e), matrix(e, q), norm(e), matrix(2 * i, e), matrix(e, i),
            q_norm_D=norm(d), k_norm_D=norm(d), index=n,
        )
        for n in range(config.num_layers)
    )  # fmt: skip
    return DecoderWeights(matrix(config.vocab_size, e), matrix(config.vocab_size, e), norm(e), layers)
