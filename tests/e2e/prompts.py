"""Prompts of the parity check: slices of texts that are part of the project, the same on every machine."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
SHORTEST, LONGEST = 50, 300
#: Coprime with the number of lengths, so that they spread.
_STRIDE = 97


def make_prompts(model_dir: Path, count: int) -> list[tuple[int, ...]]:
    """Token ids of ``count`` prompts of 50 to 300 tokens, no two with a common first block."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    sources = [
        list(tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False).ids)
        for path in (Path(__file__).with_name("texts.txt"), ROOT / "LICENSE")
    ]
    prompts = []
    for index in range(count):
        ids = sources[index % len(sources)]
        length = SHORTEST + index * _STRIDE % (LONGEST - SHORTEST + 1)
        start = index * (len(ids) - LONGEST) // count
        prompts.append(tuple(ids[start : start + length]))
    if len({prompt[:16] for prompt in prompts}) != count:
        raise ValueError("two prompts begin with the same block")
    return prompts
