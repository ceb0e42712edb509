"""Reading config.json: every supported family, and clear refusals of what is not supported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.models.config import RopeConfig
from shared.models.registry import ARCHITECTURES, load_config, read_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
}


def test_defaults_follow_the_other_keys() -> None:
    config = read_config(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.num_valid_tokens) == (4, 16, 100)
    assert config.rope == RopeConfig(theta=10000.0, original_max_position=128)
    assert config.eos_token_ids == ()
    assert not config.tie_embeddings


def test_both_spellings_of_rope_settings() -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    old = read_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": scaling})
    new = read_config({**LLAMA, "rope_parameters": {**scaling, "rope_theta": 5e5}})
    assert old.rope == new.rope == RopeConfig(5e5, "linear", 2.0, original_max_position=128)


def test_an_unknown_architecture_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="MambaForCausalLM is not supported") as caught:
        read_config({**LLAMA, "architectures": ["MambaForCausalLM"]})
    assert all(name in caught.value.message for name in ARCHITECTURES)
    with pytest.raises(ConfigError, match="none named"):
        read_config({})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope type yarn"),
        ({"num_key_value_heads": 3}, "head counts"),
        ({"vocab_size": "many"}, "wrong type"),
        ({"hidden_size": None}, "wrong type"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"hidden_size": -64}, "hidden_size is -64"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": -2}, "head counts"),
        ({"head_dim": -16}, "head counts"),
        ({"rms_norm_eps": 10**400}, "wrong type"),
        ({"triptych_vocab_size": 101}, "triptych_vocab_size"),
    ],
)
def test_unsupported_settings_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config({**LLAMA, **change})


def test_a_missing_key_is_named() -> None:
    keys = {k: v for k, v in LLAMA.items() if k != "hidden_size"}
    with pytest.raises(ConfigError, match="hidden_size"):
        read_config(keys)


def test_qwen_windows_are_for_all_layers_or_none() -> None:
    qwen = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 32}
    assert read_config(qwen).window is None
    assert read_config({**qwen, "use_sliding_window": True, "max_window_layers": 4}).window is None
    assert read_config({**qwen, "use_sliding_window": True, "max_window_layers": 0}).window == 32
    with pytest.raises(ConfigError, match="sliding window"):
        read_config({**qwen, "use_sliding_window": True, "max_window_layers": 2})
    assert read_config(qwen).qkv_bias and not read_config(qwen).o_bias


def test_a_vision_language_model_wraps_a_llama() -> None:
    text = {k: v for k, v in LLAMA.items() if k != "architectures"}
    keys = {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "image_token_id": 90,
        "text_config": text,
        "tie_word_embeddings": True,
        "triptych_vocab_size": 88,
    }
    config = read_config(keys)
    assert (config.num_valid_tokens, config.vocab_size, config.image_token_id) == (88, 100, 90)
    assert (config.prefix, config.tie_embeddings) == ("model.text_model.", True)
    assert config.architecture == "SmolVLMForConditionalGeneration"
    for outside in (-1, 100):
        with pytest.raises(ConfigError, match="image_token_id"):
            read_config({**keys, "image_token_id": outside})
    with pytest.raises(ConfigError, match="around gemma"):
        read_config({**keys, "text_config": {**text, "model_type": "gemma"}})


def test_eos_ids_of_the_generation_config_come_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 2}))
    assert load_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    assert load_config(tmp_path).eos_token_ids == (5, 2)


@pytest.mark.parametrize("eos", ["x", [2, "x"], True, 2.5, {}, -1, 100, [2, 10**9]])
def test_eos_ids_must_be_tokens_of_the_model(eos: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match=r"^config\.json: eos_token_id"):
        read_config({**LLAMA, "eos_token_id": eos})


@pytest.mark.parametrize("content", [None, "", "[1]", "{"])
def test_unreadable_files_are_config_errors(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_config(tmp_path)


def test_the_kv_geometry_follows() -> None:
    mistral = {
        **LLAMA,
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 64,
        "num_key_value_heads": 2,
    }
    spec = read_config(mistral).kv_cache_spec(16)
    (group,) = spec.groups
    assert (group.num_layers, group.num_kv_heads, group.head_dim, group.window) == (4, 2, 16, 64)
    assert group.extent_bytes(16) == 4 * 2 * 2 * 16 * 16 * 4
    assert read_config(mistral).embedding_bytes == 256
