"""Small tokenizers of the three decoder kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from shared.text.tokenizer import Tokenizer

CHATML = Path(__file__).parent / "fixtures" / "chatml"


@pytest.fixture(scope="session")
def chatml_dir() -> Path:
    """A model directory with a byte-level tokenizer of 401 tokens and a ChatML template."""
    return CHATML


@pytest.fixture(scope="session")
def chatml() -> Tokenizer:
    return Tokenizer.load(CHATML)


def _fallback_spec(prepend_scheme: str) -> dict[str, Any]:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["\u2581", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "hell", "hello", "\u2581hello"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("\u2581", "hello")]
    backend = Backend(
        models.BPE(
            vocab={word: index for index, word in enumerate(words)},
            merges=merges,
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme=prepend_scheme, split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    spec: dict[str, Any] = json.loads(backend.to_str())
    return spec


@pytest.fixture(scope="session")
def fallback_spec() -> dict[str, Any]:
    """A byte-fallback tokenizer that marks only the first word of a text."""
    return _fallback_spec("first")


@pytest.fixture(scope="session")
def fallback(fallback_spec: dict[str, Any]) -> Tokenizer:
    return Tokenizer(fallback_spec)


@pytest.fixture(scope="session")
def wordpiece() -> Tokenizer:
    """A tokenizer whose decoder looks at neighbours, so that it has no byte table."""
    words = ["[UNK]", "[SEP]", "un", "##like", "##ly", "story", "a"]
    backend = Backend(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[SEP]"])
    return Tokenizer(json.loads(backend.to_str()))


@pytest.fixture(params=["chatml", "fallback", "wordpiece"])
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer: Tokenizer = request.getfixturevalue(request.param)
    return tokenizer
