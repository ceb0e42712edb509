"""Messages to prompt token ids: owns who may write special tokens, and where media stand.

Only the template may write special tokens. Each special-token text inside content is broken with a
private character before rendering; in the rendered text every special token is then the template's.
The character is taken out again and the pieces between special tokens are encoded as plain text, so
ordinary content gets the very ids that encoding the whole rendered text would give.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct

from shared.errors import ContextLengthExceeded, InvalidRequest
from shared.text.tokenizer import SpecialToken, Tokenizer
from shared.types.inference import Message, TextPart

_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class MediaSlot(Struct, frozen=True):
    """``num_tokens`` placeholder positions from ``offset``."""

    offset: int
    num_tokens: int


class RenderedPrompt(Struct, frozen=True):
    """A prompt, with one slot for each media item in the order of the messages."""

    token_ids: tuple[int, ...]
    media_slots: tuple[MediaSlot, ...] = ()


def render_chat(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    image_rows: Sequence[int] = (),
    image_token_id: int | None = None,
    max_model_len: int | None = None,
) -> RenderedPrompt:
    """The prompt that asks for the next assistant turn.

    ``image_rows``: placeholder tokens of each picture, in the order of the messages. With
    ``max_model_len``, text that is too long whatever its tokens is refused before it is encoded
    (ContextLengthExceeded). Raises InvalidRequest when the template refuses the messages or has no
    place for a picture.
    """
    template = tokenizer.chat_template
    if template is None:
        raise InvalidRequest("this model has no chat template", param="messages")
    texts = [part.text for m in messages for part in m.parts if isinstance(part, TextPart)]
    _check_length(sum(map(len, texts)), tokenizer, max_model_len, "messages")
    guard, picture = _unused_characters([*texts, template.source])
    shield = _Shield(tokenizer, guard)
    content = _as_parts if template.takes_parts else _as_string
    rendered = template.render([{"role": m.role, "content": content(m, shield, picture)} for m in messages])
    builder = _PromptBuilder(tokenizer, guard, image_token_id, image_rows)
    for index, stretch in enumerate(rendered.split(picture)):
        if index:
            builder.add_picture()
        builder.add_text(stretch)
    return builder.finish()


def encode_prompt(
    text: str,
    tokenizer: Tokenizer,
    *,
    image_token_id: int | None = None,
    max_model_len: int | None = None,
) -> tuple[int, ...]:
    """Ids of a raw prompt, in which special-token text means special tokens. ``max_model_len`` as for
    ``render_chat``. Raises InvalidRequest."""
    _check_length(len(text), tokenizer, max_model_len, "prompt")
    return check_prompt_ids(tokenizer.encode(text, add_special_tokens=True), image_token_id=image_token_id)


def check_prompt_ids(token_ids: Iterable[int], *, image_token_id: int | None = None) -> tuple[int, ...]:
    """The ids of a raw prompt; InvalidRequest when it is empty or holds a placeholder without media."""
    ids = tuple(token_ids)
    if not ids:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if image_token_id is not None and image_token_id in ids:
        raise InvalidRequest("the prompt holds an image placeholder without an image", param="prompt")
    return ids


def _check_length(num_chars: int, tokenizer: Tokenizer, max_model_len: int | None, param: str) -> None:
    """Characters are at least as many bytes, and a token has only so many of those."""
    longest = tokenizer.max_token_bytes
    if max_model_len is not None and longest is not None and num_chars > max_model_len * longest:
        message = f"the text is longer than the model's context of {max_model_len} tokens"
        raise ContextLengthExceeded(message, param=param)


def _unused_characters(texts: Sequence[str]) -> tuple[str, str]:
    """Two private-use characters that no text holds."""
    used = set("".join(texts))
    free = (chr(code) for codes in _PRIVATE_USE for code in codes if chr(code) not in used)
    try:
        return next(free), next(free)
    except StopIteration:
        raise InvalidRequest("the messages use every private-use character", param="messages") from None


class _Shield:
    """Breaks special-token text in content, also where content and template would form it together."""

    def __init__(self, tokenizer: Tokenizer, guard: str) -> None:
        self._pattern, self._guard = tokenizer.special_pattern, guard
        self._fragments = tokenizer.special_fragments

    def __call__(self, text: str) -> str:
        while True:  # breaking one token can uncover another that overlapped it
            broken = self._pattern.sub(lambda m: m[0][0] + self._guard + m[0][1:], text)
            if broken == text:
                return self._shield_edges(text)
            text = broken

    def _shield_edges(self, text: str) -> str:
        """The guard goes inside the outer white space, so that a template's trimming still works."""
        heads, tails, longest = self._fragments
        core_end, core_start = len(text.rstrip()), len(text) - len(text.lstrip())
        end = text[:core_end]
        if any(end[-size:] in heads for size in range(1, min(longest, len(end) - core_start) + 1)):
            text = end + self._guard + text[core_end:]
        start = text[core_start : core_start + longest]
        if any(start[:size] in tails for size in range(1, len(start) + 1)):
            text = text[:core_start] + self._guard + text[core_start:]
        return text


def _run_together(message: Message, picture: str) -> str:
    """All parts in a row, pictures as the private mark."""
    return "".join(part.text if isinstance(part, TextPart) else picture for part in message.parts)


def _as_string(message: Message, shield: _Shield, picture: str) -> str:
    return shield(_run_together(message, picture))


def _as_parts(message: Message, shield: _Shield, picture: str) -> list[dict[str, Any]]:
    """Parts as templates know them; neighbouring texts become one, so that they cannot form a token."""
    parts: list[dict[str, Any]] = []
    for index, stretch in enumerate(_run_together(message, picture).split(picture)):
        if index:
            parts.append({"type": "image"})
        if stretch:
            parts.append({"type": "text", "text": shield(stretch)})
    return parts


class _PromptBuilder:
    """Collects ids and slots from stretches of rendered text."""

    def __init__(
        self, tokenizer: Tokenizer, guard: str, image_token_id: int | None, image_rows: Sequence[int]
    ) -> None:
        self._tokenizer, self._guard = tokenizer, guard
        self._image_token_id, self._image_rows = image_token_id, image_rows
        self._ids: list[int] = []
        self._slots: list[MediaSlot] = []

    def add_text(self, text: str) -> None:
        """Rendered text; special tokens in it are the template's."""
        position = 0
        for match, token in self._tokenizer.find_special(text):
            self._add_plain(text[position : match.start()])
            self._add_special(token)
            position = match.end()
        self._add_plain(text[position:])

    def add_picture(self) -> None:
        """The next picture's placeholders."""
        index = len(self._slots)
        if self._image_token_id is None or index >= len(self._image_rows):
            raise InvalidRequest("the prompt has more image placeholders than images", param="messages")
        self._slots.append(MediaSlot(len(self._ids), self._image_rows[index]))
        self._ids += [self._image_token_id] * self._image_rows[index]

    def finish(self) -> RenderedPrompt:
        if len(self._slots) != len(self._image_rows):
            raise InvalidRequest("the chat template has no place for an image", param="messages")
        return RenderedPrompt(tuple(self._ids), tuple(self._slots))

    def _add_special(self, token: SpecialToken) -> None:
        if token.id == self._image_token_id:
            self.add_picture()
        else:
            self._ids.append(token.id)

    def _add_plain(self, piece: str) -> None:
        piece = piece.replace(self._guard, "")
        if piece:
            self._ids += self._tokenizer.encode_plain(piece, at_start=not self._ids)
