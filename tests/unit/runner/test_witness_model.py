"""The witness model directory and its configuration."""

import json
import runpy
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from shared.errors import ConfigError
from shared.runner.witness_config import WitnessConfig, load_witness_config

MODEL_DIR = Path(__file__).resolve().parents[3] / "models" / "witness"


def test_the_directory_holds_the_default_model() -> None:
    assert load_witness_config(MODEL_DIR) == WitnessConfig()


def test_the_tokenizer_is_one_token_a_byte_and_four_special_tokens() -> None:
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    text = "Wörter\n\tund 🙂 <|im_end|>"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == [*text.removesuffix("<|im_end|>").encode(), 258]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    config = WitnessConfig()
    assert tokenizer.get_vocab_size() == config.vocab_size
    assert tokenizer.token_to_id("<|im_end|>") == config.eos_token_id
    assert tokenizer.token_to_id("<|image|>") == config.image_token_id


def test_the_committed_tokenizer_is_what_its_builder_writes() -> None:
    built = runpy.run_path(str(MODEL_DIR / "build.py"))["build_tokenizer"]()
    committed = json.loads((MODEL_DIR / "tokenizer.json").read_text())
    assert json.loads(built.to_str()) == committed


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "[]",
        '{"model_type": "llama"}',
        '{"model_type": "witness", "candidates": 1}',
        '{"model_type": "witness", "num_layers": 0}',
        '{"model_type": "witness", "eos_token_id": 3}',
        '{"model_type": "witness", "key": "x"}',
        '{"model_type": "witness", "key": true}',
    ],
)
def test_other_configurations_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError):
        load_witness_config(tmp_path)


def test_a_missing_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        load_witness_config(tmp_path)
