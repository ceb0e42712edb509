"""Time and randomness as injected objects; the only module that reads the system's own."""

from __future__ import annotations

import secrets
import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds. Durations go on the wire, never instants."""

    def now(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...


class MonotonicClock:
    """The system's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves when told to."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward; a negative step is refused with ValueError."""
        if seconds < 0:
            raise ValueError("a clock does not go back")
        self._now += seconds


class Entropy(Protocol):
    """A source of identifiers and seeds."""

    def hex_id(self) -> str:
        """128 random bits as 32 hex digits."""
        ...

    def seed(self) -> int:
        """63 random bits."""
        ...


class SystemEntropy:
    """The operating system's random numbers."""

    def hex_id(self) -> str:
        return secrets.token_hex(16)

    def seed(self) -> int:
        return secrets.randbits(63)


class CountingEntropy:
    """Identifiers 1, 2, 3, ...: for tests and simulations."""

    def __init__(self, start: int = 1) -> None:
        self._next = start

    def seed(self) -> int:
        value, self._next = self._next, self._next + 1
        return value

    def hex_id(self) -> str:
        return f"{self.seed():032x}"
