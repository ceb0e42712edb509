"""The engine thread: schedule -> run -> update, overlapped.

Step N+1 is planned and launched before step N's tokens are read, so bookkeeping hides behind the
device. All state of a worker is touched here and nowhere else.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

from shared.clock import Clock
from shared.engine.core import EngineCore
from shared.engine.inbox import Inbox, Outbox
from shared.engine.observe import observe_status, observe_step
from shared.runner.base import PendingStep, Runner
from shared.scheduler.plan_builder import ScheduledStep
from shared.scheduler.scheduler import Scheduler
from shared.types.worker import Status

#: How often Status goes out, and the longest sleep of an idle engine.
STATUS_INTERVAL_S = 0.5

log = logging.getLogger(__name__)


class _Flying(NamedTuple):
    """A step on the device since ``launched``, in seconds of the injected clock."""

    step: ScheduledStep
    pending: PendingStep
    launched: float


class EngineLoop:
    """Owns the engine thread. ``fatal`` is called (in that thread) when the engine cannot go on."""

    def __init__(
        self,
        core: EngineCore,
        scheduler: Scheduler,
        runner: Runner,
        inbox: Inbox,
        outbox: Outbox,
        clock: Clock,
        fatal: Callable[[BaseException], None],
    ) -> None:
        self._core = core
        self._scheduler = scheduler
        self._runner = runner
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
        self._inbox.post(self._core.abort_all)
        self._stopping.set()
        self._inbox.post(lambda: None)
        self._thread.join()
        self._runner.close()

    def _main(self) -> None:
        try:
            self._run()
        except Exception as error:
            log.exception("the engine thread stopped")
            self._fatal(error)

    def _run(self) -> None:
        flying: _Flying | None = None
        while flying or not self._stopping.is_set():
            self._inbox.run()
            self._core.tick()
            step = self._scheduler.schedule()
            launched = _Flying(step, self._runner.execute(step.plan), self._clock.now()) if step else None
            if flying:
                self._finish(flying)
            self._report()
            self._outbox.flush()
            # What came home may have made room for more, so look again before going to sleep.
            if flying is None and launched is None and not self._stopping.is_set():
                self._inbox.wait(STATUS_INTERVAL_S)
            flying = launched

    def _finish(self, flying: _Flying) -> None:
        result = flying.pending.result()
        observe_step(flying.step, self._clock.now() - flying.launched)
        self._core.num_steps += 1
        self._core.on_outcomes(self._scheduler.update(flying.step, result))

    def _report(self) -> None:
        if self._clock.now() < self._next_status:
            return
        self._next_status = self._clock.now() + STATUS_INTERVAL_S
        status = self._core.status()
        observe_status(status)
        self._outbox.emit(Status(status))
