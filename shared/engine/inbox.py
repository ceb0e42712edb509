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
Deliver = Callable[[list[Event]], None]


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
    """Collects the events of one turn; each router gets its own as one batch."""

    def __init__(self) -> None:
        self._batches: dict[str, list[Event]] = {}
        self._subscribers: tuple[tuple[str, Deliver], ...] = ()
        self._lock = threading.Lock()

    def emit(self, router_id: str, event: Event) -> None:
        """Add an event to this turn's batch of one router. Engine thread only."""
        self._batches.setdefault(router_id, []).append(event)

    def broadcast(self, event: Event) -> None:
        """Add an event to the batches of all routers. Engine thread only."""
        for router_id in {router_id for router_id, _ in self._subscribers}:
            self.emit(router_id, event)

    def flush(self) -> None:
        """Deliver the batches; those of routers that are gone are dropped. Engine thread only."""
        if not self._batches:
            return
        batches, self._batches = self._batches, {}
        for router_id, deliver in self._subscribers:
            if batch := batches.get(router_id):
                deliver(batch)

    def subscribe(self, router_id: str, deliver: Deliver) -> Callable[[], None]:
        """Call ``deliver`` with every batch for that router, from the engine thread, until the returned
        function is called. ``deliver`` must not block. Any thread."""
        entry = (router_id, deliver)
        with self._lock:
            self._subscribers = (*self._subscribers, entry)

        def unsubscribe() -> None:
            with self._lock:
                self._subscribers = tuple(e for e in self._subscribers if e is not entry)

        return unsubscribe
