"""A model directory that cannot be served is known before any process starts."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from services.cli.modelfiles import check_files
from shared.errors import ConfigError


def safetensors(nbytes: int = 8) -> bytes:
    header = json.dumps(
        {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "__metadata__": {}}
    ).encode()
    return struct.pack("<Q", len(header)) + header + bytes(nbytes)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    (tmp_path / "model.safetensors").write_bytes(safetensors())
    return tmp_path


def test_a_whole_directory_passes(model: Path) -> None:
    check_files(model)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", b"{", "cannot be read"),
        ("tokenizer.json", b"{}", "describes no tokenizer"),
        ("tokenizer.json", b"[]", "describes no tokenizer"),
        ("model.safetensors", None, "no weights"),
        ("model.safetensors", safetensors(7), "cut off"),
        ("model.safetensors", safetensors(9), "longer"),
        ("model.safetensors", b"", "not a safetensors"),
        ("model.safetensors", b"\xff" * 20, "not a safetensors"),
        ("model.safetensors", struct.pack("<Q", 2) + b"[]", "not a safetensors"),
        ("other.safetensors", b"x" * 40, "other.safetensors is not"),
        ("model.safetensors.index.json", b'{"weight_map": {"w": "gone.safetensors"}}', "no gone.safetensors"),
        ("model.safetensors.index.json", b'{"weight_map": {}}', "names no files"),
    ],
)
def test_what_is_wrong_is_said(model: Path, name: str, content: bytes | None, problem: str) -> None:
    if content is None:
        (model / name).unlink()
    else:
        (model / name).write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        check_files(model)


def test_a_model_that_reads_pictures_says_how_they_are_prepared(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"no preprocessor_config\.json"):
        check_files(model, sees=True)
    (model / "preprocessor_config.json").write_text("{}")
    check_files(model, sees=True)
