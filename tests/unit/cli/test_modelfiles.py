"""A model directory that cannot be served is known before any process starts."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from services.cli.modelfiles import check_files, check_prompt_files
from shared.errors import ConfigError
from tests.unit.cli.helpers import WITNESS

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 16,
    "tie_word_embeddings": True,
}
LAYER = {
    "input_layernorm": (8,),
    "self_attn.q_proj": (8, 8),
    "self_attn.k_proj": (4, 8),
    "self_attn.v_proj": (4, 8),
    "self_attn.o_proj": (8, 8),
    "mlp.gate_proj": (6, 8),
    "mlp.up_proj": (6, 8),
    "mlp.down_proj": (8, 6),
}
SHAPES = {
    "model.embed_tokens.weight": (10, 8),
    "model.norm.weight": (8,),
    **{f"model.layers.{n}.{name}.weight": shape for n in range(2) for name, shape in LAYER.items()},
}
PREPROCESSOR = {"size": [16, 16], "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
SMOLVLM: dict[str, Any] = {
    "architectures": ["SmolVLMForConditionalGeneration"],
    "model_type": "smolvlm",
    "image_token_id": 9,
    "scale_factor": 2,
    "vision_config": {"image_size": 16, "patch_size": 4},
    "text_config": {name: value for name, value in CONFIG.items() if name != "architectures"},
}


def safetensors(shapes: Mapping[str, tuple[int, ...]] = SHAPES, more: int = 0) -> bytes:
    """A file of these tensors in float32; ``more`` bytes than it says."""
    header: dict[str, Any] = {"__metadata__": {}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end + more)


def index(*files: str) -> bytes:
    return json.dumps({"weight_map": {str(n): file for n, file in enumerate(files)}}).encode()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    shutil.copyfile(WITNESS / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "model.safetensors").write_bytes(safetensors())
    return tmp_path


def problems(model: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        check_files(model)
    return caught.value.message


def test_a_whole_directory_passes(model: Path) -> None:
    check_files(model)
    check_prompt_files(WITNESS)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", b"{", "cannot be read"),
        ("tokenizer.json", b"{}", "describes no tokenizer"),
        ("tokenizer.json", b"[]", "describes no tokenizer"),
        ("tokenizer.json", b'{"model": {"type": "BPE"}}', "tokenizer.json"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json cannot be read"),
        ("chat_template.jinja", b"{% for %}", "chat_template.jinja: the chat template does not compile"),
        ("chat_template.jinja", b"", "chat_template.jinja: the chat template is empty"),
        ("chat_template.jinja", b"\xff\xfe", "chat_template.jinja is not UTF-8"),
        ("model.safetensors", None, "no weights"),
        ("model.safetensors", safetensors(more=-1), "cut off"),
        ("model.safetensors", safetensors(more=1), "longer"),
        ("model.safetensors", b"", "not a safetensors"),
        ("model.safetensors", b"\xff" * 20, "not a safetensors"),
        ("model.safetensors", struct.pack("<Q", 2) + b"[]", "not a safetensors"),
        ("other.safetensors", b"x" * 40, "other.safetensors is not"),
        ("model.safetensors.index.json", index("gone.safetensors"), "no gone.safetensors"),
        ("model.safetensors.index.json", index("../model.safetensors"), "no file of the model directory"),
        ("model.safetensors.index.json", index(), "names no files"),
    ],
)
def test_what_is_wrong_is_said(model: Path, name: str, content: bytes | None, problem: str) -> None:
    if content is None:
        (model / name).unlink()
    else:
        (model / name).write_bytes(content)
    assert problem in problems(model)


def test_shards_without_an_index_are_said(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    message = problems(model)
    assert "no model.safetensors.index.json" in message and "model-00001-of-00001" in message
    names = dict.fromkeys(SHAPES, "model-00001-of-00001.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    check_files(model)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hidden_size": 16}, "model.embed_tokens.weight is [10, 8]; config.json says [10, 16]"),
        ({"vocab_size": 11}, "model.embed_tokens.weight is [10, 8]"),
        ({"num_hidden_layers": 1}, "more than the 1 layers"),
        ({"num_hidden_layers": 3}, "the weights lack model.layers.2.input_layernorm.weight"),
        ({"num_key_value_heads": 4}, "model.layers.0.self_attn.k_proj.weight is [4, 8]"),
        ({"intermediate_size": 7}, "and 3 more tensors"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
    ],
)
def test_weights_that_do_not_fit_the_configuration_are_said(
    model: Path, change: dict[str, int], problem: str
) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, **change}))
    assert problem in problems(model)


def test_a_model_that_reads_pictures_says_how_they_are_prepared(model: Path) -> None:
    (model / "config.json").write_text(json.dumps(SMOLVLM))
    shapes = {name.replace("model.", "model.text_model.", 1): shape for name, shape in SHAPES.items()}
    (model / "model.safetensors").write_bytes(safetensors(shapes))
    assert "no preprocessor_config.json" in problems(model)
    for broken in ("", "{", "{}", json.dumps({**PREPROCESSOR, "size": [100_000, 100_000]})):
        (model / "preprocessor_config.json").write_text(broken)
        assert problems(model)
    (model / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    check_files(model)
