from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.text.tokenizer import Tokenizer


def test_a_directory_tells_end_ids_and_named_tokens(chatml: Tokenizer) -> None:
    assert chatml.eos_ids == (2, 0)
    assert chatml.names["bos_token"] == "<|im_start|>"
    assert chatml.special_ids == {0, 1, 2, 3}
    assert chatml.vocab_size == 401
    assert chatml.chat_template is not None


def test_end_ids_come_from_the_model_config_when_no_generation_config(
    tmp_path: Path, chatml_dir: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((chatml_dir / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 7}}))
    assert Tokenizer.load(tmp_path).eos_ids == (7,)
    (tmp_path / "config.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    assert Tokenizer.load(tmp_path).eos_ids == (2,)


def test_special_text_is_special_or_plain_by_choice(chatml: Tokenizer) -> None:
    text = "a<|im_end|>b"
    assert 2 in chatml.encode(text)
    plain = chatml.encode_plain(text)
    assert 2 not in plain
    assert chatml.decode(plain) == text


def test_a_piece_from_the_middle_has_no_word_start_mark(fallback: Tokenizer) -> None:
    assert fallback.decode(fallback.encode_plain("hello")) == "hello"
    start = fallback.token_id("\u2581hello")
    assert fallback.encode_plain("hello") == [start]
    assert fallback.encode_plain("hello", at_start=False) == [fallback.token_id("hello")]
    assert fallback.token_id("</s>") not in fallback.encode_plain("hello</s>", at_start=False)


def test_token_bytes_join_to_the_text(chatml: Tokenizer, fallback: Tokenizer) -> None:
    text = "hello \u65e5\U0001f600"
    for tokenizer, lead in ((chatml, b""), (fallback, b" ")):
        ids = tokenizer.encode(text)
        assert b"".join(tokenizer.token_bytes(i) for i in ids) == lead + text.encode()
        assert tokenizer.token_bytes(10_000) == b""


def test_a_tokenizer_without_byte_table_still_names_its_tokens(wordpiece: Tokenizer) -> None:
    assert wordpiece.byte_table is None
    story = wordpiece.token_id("story")
    assert story is not None
    assert wordpiece.token_bytes(story) == b"story"


def test_the_digest_tells_tokenizers_apart(chatml: Tokenizer, fallback: Tokenizer, chatml_dir: Path) -> None:
    assert chatml.digest == Tokenizer.load(chatml_dir).digest != fallback.digest


@pytest.mark.parametrize("content", [None, "[]", "{", '{"version":"1.0","model":{"type":"Nonsense"}}'])
def test_an_unusable_directory_is_a_config_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) not in caught.value.message
