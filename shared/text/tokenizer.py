"""Text to token ids and back: owns one model directory's tokenizer; not chat templates or streams.

Text is encoded in two ways. ``encode`` reads special-token text as special tokens, as a template
or a raw prompt means it. ``encode_plain`` reads it as ordinary characters, as user content means it.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from shared.errors import ConfigError
from shared.text.chat_template import ChatTemplate, load_chat_template
from shared.text.token_bytes import ByteTable, build_byte_table

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class SpecialToken(NamedTuple):
    """A special token as a template writes it; ``lstrip``/``rstrip`` swallow white space beside it."""

    id: int
    text: str
    lstrip: bool
    rstrip: bool


class Tokenizer:
    """The tokenizer of one model directory. Immutable once loaded; encoding is safe in any thread.

    ``chat_template`` is None for a model without one; ``names`` are the named special tokens
    (``bos_token`` ...) as text; ``vocab_size`` is the smallest bound of all ids that it makes.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        *,
        names: Mapping[str, str] | None = None,
        eos_ids: Sequence[int] = (),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self._spec = spec
        self._encoder = _build(spec)
        self.special_tokens: tuple[SpecialToken, ...] = tuple(
            SpecialToken(t["id"], t["content"], bool(t.get("lstrip")), bool(t.get("rstrip")))
            for t in spec.get("added_tokens", ())
            if t.get("special")
        )
        self.special_ids = frozenset(token.id for token in self.special_tokens)
        longest_first = sorted(self.special_tokens, key=lambda t: -len(t.text))
        self.special_pattern = _any_of(re.escape(t.text) for t in longest_first)
        self._special_stripping = _any_of(
            (r"\s*" if t.lstrip else "") + re.escape(t.text) + (r"\s*" if t.rstrip else "")
            for t in longest_first
        )
        self._special_by_text = {t.text.strip(): t for t in self.special_tokens}
        self.names = dict(names or {})
        self.eos_ids = tuple(eos_ids)
        self.chat_template = chat_template
        self._vocab = self._encoder.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._vocab.values(), default=-1) + 1

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """Read a model directory. Raises ConfigError when a file is missing or unreadable."""
        spec = _read_json(model_dir / "tokenizer.json")
        if not spec:
            there = (model_dir / "tokenizer.json").exists()
            problem = "an empty tokenizer.json" if there else "no tokenizer.json"
            raise ConfigError(f"{problem} in model directory {model_dir.name}")
        config = _read_json(model_dir / "tokenizer_config.json")
        config = {**_read_json(model_dir / "special_tokens_map.json"), **config}
        names = {name: text for name in _NAMED_TOKENS if (text := _token_text(config.get(name)))}
        added = {t["content"]: t["id"] for t in spec.get("added_tokens", ())}
        eos_ids = _eos_ids(model_dir) or tuple(added[t] for t in (names.get("eos_token"),) if t in added)
        return cls(spec, names=names, eos_ids=eos_ids, chat_template=load_chat_template(model_dir, names))

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of everything that decides token ids; part of what KV bytes mean."""
        return hashlib.sha256(json.dumps(self._spec, sort_keys=True).encode()).hexdigest()

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of ``text``; special-token text in it becomes special ids. ``add_special_tokens`` adds
        what the model expects around a raw prompt (often a beginning-of-text token)."""
        ids: list[int] = self._encoder.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_plain(self, text: str, *, at_start: bool = True) -> list[int]:
        """Ids of ``text`` with special-token text read as ordinary characters. ``at_start`` False = a
        piece from the middle of a text, where no word-start mark is added."""
        plain = self.special_pattern.search(text) is not None
        encoder = self._variant(plain, at_start)
        ids: list[int] = encoder.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of whole ids; ill-formed bytes become U+FFFD."""
        return str(self._encoder.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def find_special(self, text: str) -> Iterator[tuple[re.Match[str], SpecialToken]]:
        """Special-token text in ``text``, in order, with the white space that it swallows."""
        by_text = self._special_by_text
        for match in self._special_stripping.finditer(text):
            yield match, by_text[match[0].strip()]

    @cached_property
    def special_fragments(self) -> tuple[frozenset[str], frozenset[str], int]:
        """Proper beginnings and proper ends of special-token texts, and the length of the longest."""
        texts = [t.text for t in self.special_tokens]
        heads = frozenset(text[:size] for text in texts for size in range(1, len(text)))
        tails = frozenset(text[size:] for text in texts for size in range(1, len(text)))
        return heads, tails, max(map(len, heads), default=0)

    def token_id(self, text: str) -> int | None:
        """The id of a token by its vocabulary spelling."""
        return self._vocab.get(text)

    def token_bytes(self, token_id: int) -> bytes:
        """One token's own bytes (perhaps part of a character); empty for an id without a token."""
        if self.byte_table is not None:
            pieces = self.byte_table.pieces
            return pieces[token_id] if 0 <= token_id < len(pieces) else b""
        return str(self._encoder.decode([token_id], skip_special_tokens=False)).encode()

    @cached_property
    def byte_table(self) -> ByteTable | None:
        """Bytes of every id, or None when the decoder needs neighbours to decide."""
        return build_byte_table(self._spec.get("decoder"), self._vocab)

    @cached_property
    def max_token_bytes(self) -> int | None:
        """Most bytes of text that one token can stand for; None when unknown."""
        return None if self.byte_table is None else max(map(len, self.byte_table.pieces))

    @cached_property
    def visible_byte_table(self) -> ByteTable | None:
        """The byte table with special tokens blanked."""
        if self.byte_table is None:
            return None
        pieces = list(self.byte_table.pieces)
        for token_id in self.special_ids:
            pieces[token_id] = b""
        return ByteTable(pieces, self.byte_table.strip)

    def _variant(self, plain: bool, at_start: bool) -> tokenizers.Tokenizer:
        if at_start or self._continued_spec is None:
            return self._plain if plain else self._encoder
        return self._plain_continued if plain else self._continued

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        return _build(self._spec, special_as_text=True)

    @cached_property
    def _continued(self) -> tokenizers.Tokenizer:
        return _build(self._continued_spec or self._spec)

    @cached_property
    def _plain_continued(self) -> tokenizers.Tokenizer:
        return _build(self._continued_spec or self._spec, special_as_text=True)

    @cached_property
    def _continued_spec(self) -> dict[str, Any] | None:
        return _without_word_start(self._spec)


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(patterns) or r"(?!)")


def _build(spec: Mapping[str, Any], *, special_as_text: bool = False) -> tokenizers.Tokenizer:
    try:
        encoder = tokenizers.Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # the library raises plain Exception for a bad file
        raise ConfigError("tokenizer.json cannot be loaded") from error
    encoder.no_truncation()
    encoder.no_padding()
    encoder.encode_special_tokens = special_as_text
    return encoder


def _without_word_start(spec: Mapping[str, Any]) -> dict[str, Any] | None:
    """``spec`` with "mark the first word only" turned off; None when it has no such rule."""
    changed = copy.deepcopy(dict(spec))
    pre = changed.get("pre_tokenizer") or {}
    steps = [step for step in (pre, *pre.get("pretokenizers", ())) if step.get("prepend_scheme") == "first"]
    for step in steps:
        step["prepend_scheme"] = "never"
    return changed if steps else None


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty when there is no file. Raises ConfigError on anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path.name} cannot be read") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path.name} is not a JSON object")
    return value


def _token_text(value: object) -> str:
    """A named token is written as text or as an object with ``content``."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _eos_ids(model_dir: Path) -> tuple[int, ...]:
    """Ids that end a generation, from the first file that names any."""
    config = _read_json(model_dir / "config.json")
    for source in (_read_json(model_dir / "generation_config.json"), config, config.get("text_config") or {}):
        value = source.get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value and all(isinstance(i, int) for i in value):
            return tuple(value)
    return ()
