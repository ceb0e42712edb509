"""Hands work to the engine thread and events away from it.

All bookkeeping of a worker happens in its one engine thread. Other threads (gRPC, transfer) post
calls into the inbox and never touch state; nothing here is locked but the queue itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from shared.types.worker import Event

Call = Callable[[], None]


class Inbox:
    """A queue of calls to be made in the engine thread, in order of posting."""

    def __init__(self) -> None:
        self._calls: deque[Call] = deque()
        self._filled = threading.Event()
        #: How often the engine thread came by: the sign that it has not hung.
        self.turns = 0

    def post(self, call: Call) -> None:
        """Queue a call. Any thread; never blocks."""
        self._calls.append(call)
        self._filled.set()

    def run(self) -> int:
        """Make the queued calls; returns how many. Engine thread only."""
        self.turns += 1
        self._filled.clear()
        count = 0
        while self._calls:
            self._calls.popleft()()
            count += 1
        return count

    def wait(self, timeout_s: float) -> None:
        """Sleep until something is posted, at most ``timeout_s``. Engine thread only."""
        self._filled.wait(timeout_s)


class Outbox:
    """Collects the events of one turn and delivers them as one batch to every subscriber."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._subscribers: tuple[Callable[[list[Event]], None], ...] = ()
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        """Add an event to this turn's batch. Engine thread only."""
        self._events.append(event)

    def flush(self) -> None:
        """Deliver the batch, if there is one. Engine thread only."""
        if not self._events:
            return
        batch, self._events = self._events, []
        for deliver in self._subscribers:
            deliver(batch)

    def subscribe(self, deliver: Callable[[list[Event]], None]) -> Callable[[], None]:
        """Call ``deliver`` with every batch, from the engine thread, until the returned function is
        called. ``deliver`` must not block. Any thread."""
        with self._lock:
            self._subscribers = (*self._subscribers, deliver)

        def unsubscribe() -> None:
            with self._lock:
                self._subscribers = tuple(d for d in self._subscribers if d is not deliver)

        return unsubscribe
