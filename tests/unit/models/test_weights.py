"""Prepared weights: fused rightly, keyed by content, written once; hostile files are refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from shared.errors import ConfigError
from shared.kernels import library
from shared.kernels.linear import Quantized, quantized
from shared.models import weights
from shared.models.registry import load_config
from shared.models.tensor_file import TensorFile, write_tensors
from tests.unit.models.tiny import reference_model, save


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return save(reference_model("qwen2"), tmp_path / "model", torch.bfloat16)


def _raw(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_written_tensors_are_read_back_by_both_readers(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    a, b = torch.randn(3, 4), torch.randn(5, 4)
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"ab": (torch.float32, [a, b]), "v": (torch.bfloat16, [a[0]])})
    file = TensorFile(path)
    assert torch.equal(file.get("ab"), torch.cat((a, b)))
    assert torch.equal(file.get("v"), a[0].bfloat16())
    theirs = load_file(path)
    assert torch.equal(theirs["ab"], file.get("ab"))
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        (1 << 40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"{{{{",
        _raw({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"),
        _raw({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, b"12345678"),
        _raw({"x": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, b"12345678"),
        _raw({"x": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}, b"12345678"),
        _raw({"x": {"dtype": "F32", "shape": [2]}}, b"12345678"),
        _raw({"x": None}),
    ],
)
def test_malformed_files_are_config_errors(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.safetensors"):
        TensorFile(path)


def test_missing_and_unsupported_tensors_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(_raw({"x": {"dtype": "I16", "shape": [2], "data_offsets": [0, 4]}}, b"1234"))
    with pytest.raises(ConfigError, match="no tensor y"):
        TensorFile(path).get("y")
    with pytest.raises(ConfigError, match="element type I16"):
        TensorFile(path).get("x")


def test_an_unaligned_tensor_is_still_read(tmp_path: Path) -> None:
    header = {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 4 + 1)  # data begins at an odd address
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + torch.tensor([1.5]).numpy().tobytes())
    assert TensorFile(path).get("x").tolist() == [1.5]


def test_projections_are_fused_and_types_kept(model_dir: Path, tmp_path: Path) -> None:
    checkpoint = weights.Checkpoint(model_dir)
    loaded = weights.load(weights.prepare(model_dir, tmp_path / "cache"), load_config(model_dir))
    layer, at = loaded.layers[1], "model.layers.1."
    qkv = [checkpoint.get(f"{at}self_attn.{x}_proj.weight") for x in "qkv"]
    assert torch.equal(layer.qkv_WE.float(), torch.cat(qkv).float())
    gate_up = [checkpoint.get(f"{at}mlp.{x}_proj.weight") for x in ("gate", "up")]
    assert torch.equal(layer.gate_up_2IE.float(), torch.cat(gate_up).float())
    assert layer.qkv_bias_W is not None and layer.qkv_bias_W.dtype == torch.float32
    assert layer.attn_norm_E.dtype == torch.float32
    assert layer.down_EI.dtype == (torch.bfloat16 if library.available() else torch.float32)
    assert loaded.head_VE.data_ptr() == loaded.embed_VE.data_ptr()


def test_matrices_of_products_are_quantized_row_by_row(model_dir: Path, tmp_path: Path) -> None:
    config = load_config(model_dir)
    exact = weights.load(weights.prepare(model_dir, tmp_path), config)
    int8 = weights.load(weights.prepare(model_dir, tmp_path, int8=True), config)
    pairs = [(exact.head_VE, int8.head_VE)]
    for a, b in zip(exact.layers, int8.layers, strict=True):
        pairs += [
            (a.qkv_WE, b.qkv_WE),
            (a.o_EW, b.o_EW),
            (a.gate_up_2IE, b.gate_up_2IE),
            (a.down_EI, b.down_EI),
        ]
        assert torch.equal(a.attn_norm_E, b.attn_norm_E)
    assert torch.equal(exact.embed_VE, int8.embed_VE)
    for matrix, made in pairs:
        assert isinstance(made, Quantized) and made.shape == matrix.shape
        again = quantized(matrix.float())
        assert torch.equal(made.values_NK, again.values_NK) and torch.equal(made.scale_N, again.scale_N)


def test_prepare_writes_once_and_again_when_the_model_changes(model_dir: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = weights.prepare(model_dir, cache)
    stamp = first.stat().st_mtime_ns
    assert weights.prepare(model_dir, cache) == first
    assert first.stat().st_mtime_ns == stamp
    checkpoint = model_dir / "model.safetensors"
    os.utime(checkpoint, ns=(1, 1))
    assert weights.prepare(model_dir, cache) != first


def test_a_damaged_prepared_file_is_written_again(model_dir: Path, tmp_path: Path) -> None:
    path = weights.prepare(model_dir, tmp_path)
    size = path.stat().st_size
    os.truncate(path, size // 2)
    assert weights.prepare(model_dir, tmp_path).stat().st_size == size


def test_a_checkpoint_may_be_sharded(tmp_path: Path) -> None:
    model = reference_model("llama")
    whole, parts = save(model, tmp_path / "whole"), tmp_path / "parts"
    model.save_pretrained(parts, max_shard_size="100KB")
    assert len(list(parts.glob("*.safetensors"))) > 1
    a, b = (weights.prepare(path, tmp_path) for path in (whole, parts))
    assert a != b
    assert a.read_bytes() == b.read_bytes()


@pytest.mark.parametrize("names", [{}, [], {"x": "../../secret.safetensors"}, {"x": "absent.safetensors"}])
def test_a_bad_index_is_refused(names: object, model_dir: Path, tmp_path: Path) -> None:
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ConfigError):
        weights.prepare(model_dir, tmp_path)


def test_missing_tensors_and_wrong_shapes_are_refused(model_dir: Path, tmp_path: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    for change in ({"num_hidden_layers": 4}, {"intermediate_size": 88}, {"tie_word_embeddings": False}):
        (model_dir / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ConfigError):
            weights.load(weights.prepare(model_dir, tmp_path), load_config(model_dir))


def test_a_checkpoint_of_integers_is_refused(tmp_path: Path) -> None:
    entry = {"w": {"dtype": "I8", "shape": [2, 2], "data_offsets": [0, 4]}}
    (tmp_path / "model.safetensors").write_bytes(_raw(entry, b"1234"))
    with pytest.raises(ConfigError, match="w of the checkpoint holds integers"):
        weights.Checkpoint(tmp_path).get("w")
