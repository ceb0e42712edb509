"""The event loop as tiers see it: later, elsewhere, and from another thread. Owns the helper thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol, TypeVar

from shared.telemetry.logs import get_logger

_log = get_logger(__name__)
T = TypeVar("T")


class Reactor(Protocol):
    """All calls arrive in the one thread that everything here belongs to."""

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call once after so many seconds. From that thread only."""
        ...

    def elsewhere(self, work: Callable[[], T], done: Callable[[T], None]) -> None:
        """Run ``work`` in another thread, then ``done`` with its result; in the order of the calls. ``work``
        must not raise. From that thread only."""
        ...

    def post(self, call: Callable[[], None]) -> None:
        """Call soon. From any thread."""
        ...


class LoopReactor:
    """A Reactor over a running asyncio loop. After ``close`` nothing is called any more."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self._event_loop = event_loop
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="verify")
        self._closed = False

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        self._event_loop.call_later(delay_s, self._run, call)

    def elsewhere(self, work: Callable[[], T], done: Callable[[T], None]) -> None:
        def run() -> None:
            try:
                result = work()
            except Exception:
                _log.exception("work for the tiers failed")
                return
            self.post(lambda: done(result))

        if not self._closed:
            self._executor.submit(run)

    def post(self, call: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has closed
            self._event_loop.call_soon_threadsafe(self._run, call)

    def close(self) -> None:
        """Wait for the work in flight; its results are dropped. Calling it twice is safe."""
        self._closed = True
        self._executor.shutdown()

    def _run(self, call: Callable[[], None]) -> None:
        if not self._closed:
            call()
