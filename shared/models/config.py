"""What a decoder is, in our own terms: translated once from a model directory's ``config.json``.

Owns the record and the KV geometry that follows from it. Torch-free; what each family of models
means by its keys is in ``shared.models.registry``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.types.kv import KVCacheSpec, KVGroupSpec


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. ``kind``: "default", "linear" (positions / factor) or "llama3"
    (long wavelengths / factor, with a ramp between ``original_max_position`` / high and / low)."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder with grouped-query attention and a gated feed-forward block.

    ``vocab_size`` is the number of embedding rows; ids from ``num_valid_tokens`` on are padding:
    never sampled, not part of any distribution. ``window`` in tokens, None = unlimited.
    ``prefix`` and ``head_prefix`` are where the checkpoint keeps the decoder and its output matrix.
    """

    architecture: str
    vocab_size: int
    num_valid_tokens: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    tie_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    image_token_id: int | None = None
    prefix: str = "model."
    head_prefix: str = ""

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """The KV cache of this model in float32: one group, since all layers are alike."""
        group = KVGroupSpec(self.num_layers, self.num_kv_heads, self.head_dim, "float32", self.window)
        return KVCacheSpec(block_size, (group,))

    @property
    def embedding_bytes(self) -> int:
        """Bytes of one media embedding row: ``hidden_size`` float32 values."""
        return 4 * self.hidden_size


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a model directory. Raises ConfigError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path.name} of the model directory cannot be read") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path.name} of the model directory is not a JSON object")
    return value
