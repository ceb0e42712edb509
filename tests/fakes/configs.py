"""A decoder small enough for any test."""

from __future__ import annotations

import dataclasses
from typing import Any

from shared.models.config import ModelConfig, RopeConfig

_TINY = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=104,
    num_valid_tokens=100,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope=RopeConfig(),
    max_position=256,
    tie_embeddings=True,
    qk_norm=True,
    eos_token_ids=(1,),
)


def tiny_config(**changes: Any) -> ModelConfig:
    """Two layers, ids 100 to 103 padding; with these fields otherwise."""
    return dataclasses.replace(_TINY, **changes)
