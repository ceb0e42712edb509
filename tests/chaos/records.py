"""What a chaos run writes down: requests, what clients saw of them, and faults. Plain data."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from shared.types.request import SamplingParams


class Media(Struct, frozen=True):
    """A picture in a prompt: its placeholder positions and its encoded bytes."""

    offset: int
    num_tokens: int
    data: bytes


class Case(Struct, frozen=True):
    """One request to send. ``abort_after``: the client leaves once it has seen so many tokens; 0 = never."""

    number: int
    path: str
    body: dict[str, Any]
    prompt: tuple[int, ...]
    sampling: SamplingParams
    n: int
    media: tuple[Media, ...] = ()
    stream: bool = True
    abort_after: int = 0


class Expected(Struct, frozen=True):
    """What one choice must be. ``logprobs``: of each token, and of its listed alternatives."""

    token_ids: tuple[int, ...]
    finish_reason: str
    text: str
    logprobs: tuple[tuple[float, tuple[float, ...]], ...] = ()


class Piece(Struct, frozen=True):
    """Tokens of one choice as they arrived; ``at`` in seconds of the run's clock."""

    at: float
    choice: int
    token_ids: tuple[int, ...]


class Seen(Struct):
    """What the client saw of one request. ``ending``: "done" (the whole answer), "left" (the client went
    away, as planned), "error" (a typed error, its code in ``error``), "cut" (the connection ended early), or
    "" while it runs.
    """

    number: int
    began: float
    ended: float = 0.0
    status: int = 0
    ending: str = ""
    error: str = ""
    num_endings: int = 0
    pieces: list[Piece] = []
    texts: dict[int, str] = {}
    finishes: dict[int, list[str]] = {}
    logprobs: dict[int, list[tuple[float, tuple[float, ...]]]] = {}
    prompt: tuple[int, ...] | None = None
    usage: dict[str, Any] | None = None

    def end(self, how: str, at: float, error: str = "") -> None:
        """Note an ending; the first counts, but all are counted."""
        self.num_endings += 1
        if not self.ending:
            self.ending, self.ended, self.error = how, at, error

    def tokens(self, choice: int) -> tuple[int, ...]:
        """All pieces of a choice, joined."""
        return tuple(t for piece in self.pieces if piece.choice == choice for t in piece.token_ids)


class Fault(Struct):
    """One injected fault. ``action``: "kill" (SIGKILL) or "freeze" (SIGSTOP, later SIGCONT).

    ``carried``: requests that the worker worked for when it was struck, by the router's own count.
    ``struck``: the process was seen gone (or stopped, and given up by the router); ``back``: the router is
    connected to a new incarnation (or, after a freeze, again to the same process).
    """

    kind: str
    worker: str
    action: str
    pid: int
    at: float = 0.0
    carried: int = 0
    struck: bool = False
    back: bool = False
    back_at: float = 0.0

    @property
    def verified(self) -> bool:
        return self.struck and self.back and self.carried > 0


class Rest(Struct, frozen=True):
    """What a process still held when everything was over."""

    process: str
    counts: dict[str, int]


class Violation(Struct, frozen=True):
    """One broken promise; ``number`` is the request's, -1 for the run as a whole."""

    rule: str
    number: int
    detail: str
