"""Writes the witness model's ``tokenizer.json``: one token a byte, no merges, and four special tokens.

    python models/witness/build.py [OUT]

The file is committed; the tests check that this builder still writes exactly it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image|>")


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies: itself where it is
    printable, else the next free one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def build_tokenizer() -> Tokenizer:
    """A byte's id is its value; the special tokens follow from 256 on."""
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(byte_alphabet())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    build_tokenizer().save(str(out / "tokenizer.json"))


if __name__ == "__main__":
    main()
