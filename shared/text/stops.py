"""Stop strings on decoded text: owns holding back and cutting; not tokens that stop by id.

A choice's text ends at the stop string that is complete first. Only text that could still become a
stop string is held back.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from shared.text.detokenizer import Detokenizer, make_detokenizer
from shared.text.tokenizer import Tokenizer


class StopMatcher:
    """Scans one choice's text. Not thread-safe."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """``stops`` are non-empty; ``include_stop``: the text ends after the stop string, not before."""
        self._stops, self._include = tuple(stops), include_stop
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._max_held = max(map(len, stops), default=1) - 1
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Text that is now certain, and the stop string completed by ``text``, if any. After a stop
        nothing more may be pushed. With ``may_stop`` False a completed stop string is plain text."""
        window = self._held + text
        if may_stop and text:
            hit = self._find(window, len(self._held))
            if hit is not None:
                start, stop = hit
                self._held = ""
                return window[: start + len(stop) if self._include else start], stop
        held = self._held_length(window)
        cut = len(window) - held
        self._held = window[cut:]
        return window[:cut], None

    def finish(self) -> str:
        """What was held back, once no more text comes."""
        text, self._held = self._held, ""
        return text

    def _find(self, window: str, old: int) -> tuple[int, str] | None:
        """The stop string that ends first beyond the ``old`` characters; the longest of those."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = window.find(stop, max(0, old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else best[1:]

    def _held_length(self, window: str) -> int:
        """Length of the longest end of ``window`` that begins a stop string."""
        size = len(window)
        for start in range(max(0, size - self._max_held), size):
            if window[start] in self._first_chars:
                tail = window[start:]
                if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                    return size - start
        return 0


class ChoicePiece(Struct, frozen=True):
    """What some tokens of a choice gave: its new text; how many of the tokens count (fewer than were
    pushed when a stop string ended the choice); the stop string that hit."""

    text: str
    num_tokens: int
    stop: str | None = None


class ChoiceText:
    """One choice from token ids to the text a client sees. Not thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """``min_tokens``: stop strings completed by that many tokens or fewer are plain text."""
        self._detokenizer: Detokenizer = make_detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._matcher = StopMatcher(stops, include_stop=include_stop) if stops else None
        self._include_stop, self._min_tokens = include_stop, min_tokens
        self._num_tokens = 0

    def push(self, token_ids: Sequence[int], *, closed: bool = False) -> ChoicePiece:
        """Take the next tokens. ``closed``: the last of them is an end or stop token that finished the
        choice; its own text is dropped unless stops are included."""
        shown = token_ids[:-1] if closed and not self._include_stop else token_ids
        if self._matcher is None:
            return ChoicePiece(self._detokenizer.push(shown), len(token_ids))
        return self._push_matching(self._matcher, shown, len(token_ids))

    def finish(self) -> str:
        """Text still held back, for a choice that did not end by a stop string."""
        text = self._detokenizer.finish()
        if self._matcher is None:
            return text
        sure, _ = self._matcher.push(text, may_stop=False)
        return sure + self._matcher.finish()

    def _push_matching(self, matcher: StopMatcher, shown: Sequence[int], num_tokens: int) -> ChoicePiece:
        pieces = []
        for index, token_id in enumerate(shown):
            self._num_tokens += 1
            text = self._detokenizer.push((token_id,))
            sure, stop = matcher.push(text, may_stop=self._num_tokens > self._min_tokens)
            pieces.append(sure)
            if stop is not None:
                return ChoicePiece("".join(pieces), index + 1, stop)
        return ChoicePiece("".join(pieces), num_tokens)
