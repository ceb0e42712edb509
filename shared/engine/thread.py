"""The thread that owns an engine's state: how it starts, reports and ends; not what a turn does."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from shared.clock import Clock
from shared.engine.inbox import Inbox, Outbox
from shared.engine.observe import observe_status
from shared.types.worker import Status, WorkerStatus

#: How often Status goes out, and the longest sleep of an idle engine.
STATUS_INTERVAL_S = 0.5

log = logging.getLogger(__name__)


class ThreadedCore(Protocol):
    """What the thread asks of the engine that it runs."""

    def abort_all(self) -> None: ...
    def status(self) -> WorkerStatus: ...


class Closable(Protocol):
    """What is closed when the thread has ended: a runner."""

    def close(self) -> None: ...


class EngineThread(ABC):
    """Runs ``_run`` until ``stop``. ``fatal`` is called (in the thread) when the engine cannot go on."""

    def __init__(
        self,
        core: ThreadedCore,
        runner: Closable,
        inbox: Inbox,
        outbox: Outbox,
        clock: Clock,
        fatal: Callable[[BaseException], None],
    ) -> None:
        self._threaded = core
        self._closable = runner
        self._inbox = inbox
        self._outbox = outbox
        self._clock = clock
        self._fatal = fatal
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._next_status = 0.0

    def start(self) -> None:
        """Begin; the engine accepts commands at once."""
        self._thread.start()

    def stop(self) -> None:
        """Abort what runs, finish the step in flight and end the thread. Any other thread; twice is safe."""
        if self._stopping.is_set():
            return
        self._inbox.post(self._threaded.abort_all)
        self._stopping.set()
        self._inbox.post(lambda: None)
        self._thread.join()
        self._closable.close()

    @abstractmethod
    def _run(self) -> None:
        """Turn after turn, until ``_stopping`` is set and nothing is in flight."""

    def _report(self) -> None:
        """Add a Status to this turn's events for everyone, when one is due."""
        if self._clock.now() < self._next_status:
            return
        self._next_status = self._clock.now() + STATUS_INTERVAL_S
        status = self._threaded.status()
        observe_status(status)
        self._outbox.broadcast(Status(status))

    def _main(self) -> None:
        try:
            self._run()
        except Exception as error:
            log.exception("the engine thread stopped")
            self._fatal(error)
