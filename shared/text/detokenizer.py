"""Token ids to text as they come: owns unfinished characters; not stop strings.

Pushed texts joined are the decoding of all ids; a character is never split over two pushes.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Protocol

from shared.text.token_bytes import ByteTable
from shared.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """One choice's stream of tokens. Not thread-safe."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that is certain with these ids; perhaps empty."""
        ...

    def finish(self) -> str:
        """Text still held back, an unfinished character as U+FFFD. Nothing may be pushed after it."""
        ...


def make_detokenizer(tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> Detokenizer:
    """The cheapest detokenizer that is exact for this tokenizer."""
    table = tokenizer.visible_byte_table if skip_special_tokens else tokenizer.byte_table
    if table is None:
        return WindowDetokenizer(tokenizer, skip_special_tokens)
    return ByteDetokenizer(table)


class ByteDetokenizer:
    """By a table of each token's bytes: about a microsecond a token."""

    __slots__ = ("_pending", "_pieces", "_strip")

    def __init__(self, table: ByteTable) -> None:
        self._pieces, self._strip = table
        self._pending = b""

    def push(self, token_ids: Sequence[int]) -> str:
        data = self._pending + self._bytes(token_ids)
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return self._stripped(text) if self._strip else text

    def finish(self) -> str:
        text = utf_8_decode(self._pending, "replace", True)[0]
        self._pending = b""
        return self._stripped(text) if self._strip else text

    def _bytes(self, token_ids: Sequence[int]) -> bytes:
        pieces = self._pieces
        try:
            if len(token_ids) == 1:
                return pieces[token_ids[0]]
            return b"".join([pieces[i] for i in token_ids])
        except IndexError:  # ids of padding rows have no text
            return b"".join([pieces[i] for i in token_ids if i < len(pieces)])

    def _stripped(self, text: str) -> str:
        """Drop the spaces that the decoder strips from the start of a whole text."""
        while text and self._strip:
            if text[0] != " ":
                self._strip = 0
                break
            text, self._strip = text[1:], self._strip - 1
        return text


class WindowDetokenizer:
    """By decoding a sliding window of ids with the tokenizer: for decoders without a byte table.

    The window keeps the ids of the last certain text, so that a decoder that looks at neighbours
    (word pieces, spaces) sees them.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._context: list[int] = []
        self._fresh: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def finish(self) -> str:
        text = self._new_text()
        self._context, self._fresh = [], []
        return text

    def _push_one(self, token_id: int) -> str:
        self._fresh.append(token_id)
        text = self._new_text()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._context, self._fresh = self._fresh, []
        return text

    def _new_text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._fresh)[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)
