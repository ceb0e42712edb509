"""Signals of a command that starts processes: Ctrl-C, TERM and HUP as an event, and their exit codes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

from shared.errors import InternalError

INTERRUPTED = 128 + signal.SIGINT


class Interrupted(InternalError):
    """Asked to stop while starting."""

    code = "interrupted"


class Stopping(threading.Event):
    """Set by signals, the first of which decides ``exit_code``: 128 + its number, as a shell says it."""

    exit_code = 0

    def on_signal(self, number: int) -> None:
        self.exit_code = self.exit_code or 128 + number
        self.set()


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stopping]:
    """An event that Ctrl-C, TERM and HUP set; the old handlers come back at exit. Main thread only."""
    stopping = Stopping()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda got, _: stopping.on_signal(got)) for number in numbers}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def quiet_interrupt() -> Iterator[None]:
    """Ctrl-C ends the process at once and without a word: for imports, when nothing has been started yet. An
    exception could surface anywhere in them, or be swallowed. Main thread only."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, or somebody else's
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
