"""Which models are served natively: architecture name -> how its ``config.json`` reads.

To add a dense decoder of the same build, add its reader to ``ARCHITECTURES``. Torch-free.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.models.config import ModelConfig, RopeConfig, read_json

_Keys = Mapping[str, Any]


def load_config(model_dir: Path) -> ModelConfig:
    """The configuration of a model directory. Raises ConfigError: unreadable, unknown architecture
    (the message lists what is supported), or a setting that is not supported."""
    keys = read_json(model_dir / "config.json")
    generation = model_dir / "generation_config.json"
    eos = (read_json(generation) if generation.exists() else {}).get("eos_token_id")
    config = read_config(keys)
    if eos is None:
        return config
    return dataclasses.replace(config, eos_token_ids=_eos_ids(eos, config.vocab_size, generation.name))


def read_config(keys: _Keys) -> ModelConfig:
    """Translate the content of a ``config.json``. Raises ConfigError as ``load_config`` does."""
    names = keys.get("architectures") or ["(none named)"]
    reader = ARCHITECTURES.get(names[0])
    if reader is None:
        raise ConfigError(
            f"architecture {names[0]} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    try:
        return reader(keys)
    except KeyError as error:
        raise ConfigError(f"config.json lacks {error.args[0]!r}") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError("config.json holds a value of the wrong type") from error


def _llama(keys: _Keys) -> ModelConfig:
    bias = bool(keys.get("attention_bias", False))
    return _dense(keys, qkv_bias=bias, o_bias=bias, mlp_bias=bool(keys.get("mlp_bias", False)))


def _mistral(keys: _Keys) -> ModelConfig:
    return _dense(keys, window=keys.get("sliding_window"))


def _qwen2(keys: _Keys) -> ModelConfig:
    return _dense(keys, qkv_bias=True, window=_qwen_window(keys))


def _qwen3(keys: _Keys) -> ModelConfig:
    bias = bool(keys.get("attention_bias", False))
    return _dense(keys, qkv_bias=bias, o_bias=bias, qk_norm=True, window=_qwen_window(keys))


def _smolvlm(keys: _Keys) -> ModelConfig:
    """A Llama decoder in ``text_config``; ``triptych_vocab_size`` marks padding embedding rows."""
    text = dict(keys["text_config"])
    if text.get("model_type", "llama") != "llama":
        raise ConfigError(f"a vision-language model around {text['model_type']} is not supported")
    text.setdefault("tie_word_embeddings", keys.get("tie_word_embeddings", False))
    text.setdefault("triptych_vocab_size", keys.get("triptych_vocab_size", text["vocab_size"]))
    decoder, image_token_id = _llama(text), int(keys["image_token_id"])
    if not 0 <= image_token_id < decoder.vocab_size:
        raise ConfigError(f"config.json: image_token_id {image_token_id} is outside of the vocabulary")
    return dataclasses.replace(
        decoder,
        architecture=keys["architectures"][0],
        image_token_id=image_token_id,
        prefix="model.text_model.",
    )


#: Architecture name in ``config.json`` -> reader of its keys.
ARCHITECTURES: dict[str, Callable[[_Keys], ModelConfig]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "SmolVLMForConditionalGeneration": _smolvlm,
}


def _dense(
    keys: _Keys,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    window: int | None = None,
) -> ModelConfig:
    """The keys that all dense decoders share."""
    activation = keys.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"activation {activation} is not supported; supported: silu")
    heads, hidden = _positive(keys, "num_attention_heads"), _positive(keys, "hidden_size")
    vocab_size = _positive(keys, "vocab_size")
    config = ModelConfig(
        architecture=keys.get("architectures", ["LlamaForCausalLM"])[0],
        vocab_size=vocab_size,
        num_valid_tokens=int(keys.get("triptych_vocab_size", vocab_size)),
        hidden_size=hidden,
        intermediate_size=_positive(keys, "intermediate_size"),
        num_layers=_positive(keys, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=int(keys.get("num_key_value_heads") or heads),
        head_dim=int(keys.get("head_dim") or hidden // heads),
        rms_norm_eps=float(keys["rms_norm_eps"]),
        rope=_rope(keys),
        max_position=_positive(keys, "max_position_embeddings"),
        tie_embeddings=bool(keys.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        window=None if window is None else int(window),
        eos_token_ids=_eos_ids(keys.get("eos_token_id"), vocab_size, "config.json"),
    )
    if min(config.num_kv_heads, config.head_dim) < 1 or heads % config.num_kv_heads or config.head_dim % 2:
        raise ConfigError("the head counts of config.json do not fit together")
    if not 1 <= config.num_valid_tokens <= vocab_size:
        raise ConfigError("config.json: triptych_vocab_size does not lie within vocab_size")
    return config


def _positive(keys: _Keys, name: str) -> int:
    value = int(keys[name])
    if value < 1:
        raise ConfigError(f"config.json: {name} is {value}; it must be at least 1")
    return value


def _rope(keys: _Keys) -> RopeConfig:
    """Both spellings: ``rope_parameters``, or ``rope_theta`` with ``rope_scaling``."""
    scaling: dict[str, Any] = {"rope_theta": keys.get("rope_theta", 10000.0)}
    scaling.update(keys.get("rope_scaling") or {})
    scaling.update(keys.get("rope_parameters") or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ConfigError(f"rope type {kind} is not supported; supported: default, linear, llama3")
    scaling.setdefault("original_max_position_embeddings", keys["max_position_embeddings"])
    return RopeConfig(
        theta=float(scaling["rope_theta"]),
        kind=kind,
        factor=float(scaling.get("factor", 1.0)),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_max_position=int(scaling["original_max_position_embeddings"]),
    )


def _qwen_window(keys: _Keys) -> int | None:
    """The window when all layers slide; layers of both kinds would need two KV groups."""
    if not keys.get("use_sliding_window") or keys.get("sliding_window") is None:
        return None
    num_layers = int(keys["num_hidden_layers"])
    num_full = min(int(keys.get("max_window_layers", num_layers)), num_layers)
    kinds = keys.get("layer_types") or ["full"] * num_full + ["sliding"] * (num_layers - num_full)
    sliding = [str(kind).startswith("sliding") for kind in kinds]
    if any(sliding) and not all(sliding):
        raise ConfigError("layers with and without a sliding window in one model are not supported")
    return int(keys["sliding_window"]) if all(sliding) else None


def _eos_ids(value: Any, vocab_size: int, file: str) -> tuple[int, ...]:
    """One id, several, or none. Raises ConfigError that names the file."""
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list) else (value,)
    for one in ids:
        if not isinstance(one, int) or isinstance(one, bool):
            raise ConfigError(f"{file}: eos_token_id holds {one!r:.40}, which is no token id")
        if not 0 <= one < vocab_size:
            raise ConfigError(f"{file}: eos_token_id {one} is outside of the vocabulary of {vocab_size}")
    return ids
