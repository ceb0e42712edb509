"""Tiny random checkpoints of every supported family, saved by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

#: Family -> settings beside the common ones.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biased": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama3-rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "linear-rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "mistral": {"sliding_window": 12},
    "mistral-full": {"sliding_window": None, "head_dim": 32},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2-sliding": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
    "qwen3": {"head_dim": 32},
    "qwen3-biased": {"attention_bias": True, "head_dim": 16},
}
_COMMON = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


def reference_model(family: str, seed: int = 0) -> Any:
    """A random transformers model in float32; biases and norms are random too."""
    import transformers

    kind = family.split("-")[0].replace("llama3", "llama").replace("linear", "llama")
    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind]
    config = getattr(transformers, f"{name}Config")(**{**_COMMON, **FAMILIES[family]})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 0.5, 0.2)
    return model


def save(model: Any, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the checkpoint as transformers writes it."""
    model.to(dtype).save_pretrained(path)
    model.float()
    return path
