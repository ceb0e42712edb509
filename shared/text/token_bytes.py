"""The bytes of each token id: owns the tables behind cheap detokenising; not the tokenizer itself.

Two kinds of decoder have such a table: the byte-level one (GPT-2, Llama 3, Qwen, SmolLM2), where
each character of a token stands for one byte, and the byte-fallback one (Llama 2, Mistral), where
a token is text with a visible space and rare characters are spelled by tokens like ``<0xE4>``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_VISIBLE_SPACE = "\u2581"


class ByteTable(NamedTuple):
    """``pieces[id]`` are the bytes of a token; ``strip`` leading spaces are dropped from a whole text."""

    pieces: list[bytes]
    strip: int


def byte_level_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte: itself where printable, else from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = (byte for byte in range(256) if byte not in printable)
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(shifted)})
    return alphabet


def build_byte_table(decoder: Mapping[str, Any] | None, vocab: Mapping[str, int]) -> ByteTable | None:
    """The table for a decoder as written in tokenizer.json; None when only the decoder itself knows.

    Ids that the vocabulary leaves out have no bytes.
    """
    if decoder is None:
        return None
    if decoder.get("type") == "ByteLevel":
        return ByteTable(_fill(vocab, _byte_level_piece(byte_level_alphabet())), 0)
    strip = _byte_fallback_strip(decoder)
    return None if strip is None else ByteTable(_fill(vocab, _byte_fallback_piece), strip)


def _fill(vocab: Mapping[str, int], piece: Any) -> list[bytes]:
    pieces = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        pieces[token_id] = piece(token)
    return pieces


def _byte_level_piece(alphabet: Mapping[str, int]) -> Any:
    def piece(token: str) -> bytes:
        try:
            return bytes([alphabet[char] for char in token])
        except KeyError:  # an added token with characters outside the alphabet stands for itself
            return token.encode()

    return piece


def _byte_fallback_piece(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace(_VISIBLE_SPACE, " ").encode()


def _byte_fallback_strip(decoder: Mapping[str, Any]) -> int | None:
    """Leading spaces that the decoder strips; None when it is not the byte-fallback sequence."""
    steps = [dict(step) for step in decoder.get("decoders", ())]
    kinds = [step.get("type") for step in steps]
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or kinds[3:] not in ([], ["Strip"]):
        return None
    replace = steps[0]
    if replace.get("pattern") != {"String": _VISIBLE_SPACE} or replace.get("content") != " ":
        return None
    if not kinds[3:]:
        return 0
    strip = steps[3]
    plain = strip.get("content") == " " and strip.get("stop") == 0
    return int(strip["start"]) if plain else None
