"""The witness model's definition in words, and its configuration. Owns no arithmetic.

The witness is a model without meaning: every KV entry is a digest of everything before it, and
every next token depends on every valid KV byte of its sequence. A stale, swapped or flipped byte
anywhere changes the answer. The runner and its oracle each implement this text on their own.

All integers are unsigned 64-bit, little-endian; sums are modulo 2^64; xxh3 is XXH3-64 with a seed.

* word(p): the token id at position p, kind 0; at a placeholder position the xxh3 of its embedding
  row's bytes, seed = key, kind 1.
* entry(layer, head, p) = xxh3 of the six integers (layer, head, p, kind, word, parent), seed = key,
  where parent is entry(layer, head, p - 1) as it stands in memory, 0 at p = 0.
* K holds the entry, V holds mix(entry), mix being the finaliser of splitmix64.
* A plane is the n valid entries of one (layer, head, K or V) in token order. The state after n
  tokens is the sum over all planes of the xxh3 of the plane's bytes, with
  seed = key + 1 + 2 * (layer * num_kv_heads + head) + (0 for K, 1 for V).
* draw(i) = mix(state + (i + 1) * 0x9E3779B97F4A7C15). With C candidates and S = num_text_tokens //
  (C - 1), candidate i < C - 1 has id i * S + draw(i) mod S and logit
  ((draw(i) >> 48) * C + i) / 2^13 / C, all distinct and in [0, 8). The last candidate is the end of
  sequence, with logit 9 if draw(C - 1) mod eos_period is 0 and -8 otherwise. No other id is possible.
* Embedding row i of a media item: SHAKE-128 over key, SHA-256 of the media's bytes, and i, as long
  as a row.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msgspec import Struct

from shared.errors import ConfigError

MODEL_TYPE = "witness"
_MASK = 0xFFFF_FFFF_FFFF_FFFF


class WitnessConfig(Struct, frozen=True, kw_only=True):
    """The model's numbers. ``num_kv_heads`` counts the whole model, not a rank's share.

    Ids below ``num_text_tokens`` can be sampled, and ``eos_token_id``, which lies above them.
    ``row_bytes`` is the length of an embedding row.
    """

    num_layers: int = 1
    num_kv_heads: int = 2
    vocab_size: int = 260
    num_text_tokens: int = 256
    key: int = 0x7072_6F6F_6675_6C21
    candidates: int = 8
    eos_period: int = 64
    eos_token_id: int = 258
    image_token_id: int = 259
    row_bytes: int = 64
    max_position_embeddings: int = 4096

    def __post_init__(self) -> None:
        positive = (self.num_layers, self.num_kv_heads, self.eos_period, self.row_bytes)
        if min(positive) < 1 or self.max_position_embeddings < 2 or not 0 <= self.key <= _MASK:
            raise ConfigError("witness config: a number is out of range")
        if not 2 <= self.candidates <= self.num_text_tokens + 1:
            raise ConfigError("witness config: candidates must lie between 2 and num_text_tokens + 1")
        if not self.num_text_tokens <= self.eos_token_id < self.vocab_size:
            raise ConfigError("witness config: eos_token_id must lie between num_text_tokens and vocab_size")


def load_witness_config(model_dir: str | Path) -> WitnessConfig:
    """Read ``config.json`` of a model directory. Raises ConfigError when it is not a witness model's."""
    try:
        raw = json.loads((Path(model_dir) / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError("the model directory has no readable config.json") from error
    if not isinstance(raw, dict) or raw.get("model_type") != MODEL_TYPE:
        raise ConfigError("config.json does not describe a witness model")
    values: dict[str, Any] = {name: raw[name] for name in WitnessConfig.__struct_fields__ if name in raw}
    processor = raw.get("processor")
    if isinstance(processor, dict) and "row_bytes" in processor:
        values["row_bytes"] = processor["row_bytes"]
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"config.json: {name} is not an integer")
    return WitnessConfig(**values)
