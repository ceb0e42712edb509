"""Prompts of an exact number of tokens, cut from texts of this project. Owns the cutting."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from tests.bench.figures import ROOT

_TEXTS = ("LICENSE", "docs/architecture.md", "docs/operations.md", "docs/api.md", "docs/glossary.md")
_STRIDE = 23


class Prompt(NamedTuple):
    """The same prompt as text and as token ids."""

    text: str
    token_ids: list[int]


def prompts(model_dir: Path, num_tokens: int) -> Iterator[Prompt]:
    """Prompts that are ``num_tokens`` long both ways, no two with the same first block of 16 tokens, so that
    none finds another's prefix cached. Raises RuntimeError when the texts are used up."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    text = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in _TEXTS)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    seen: set[tuple[int, ...]] = set()
    for start in range(0, len(ids) - num_tokens, _STRIDE):
        piece = ids[start : start + num_tokens]
        words = tokenizer.decode(piece, skip_special_tokens=False)
        again = tokenizer.encode(words, add_special_tokens=False).ids
        if again == piece and tuple(piece[:16]) not in seen:
            seen.add(tuple(piece[:16]))
            yield Prompt(words, piece)
    raise RuntimeError(f"the texts hold only {len(seen)} prompts of {num_tokens} tokens")
