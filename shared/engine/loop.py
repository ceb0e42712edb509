"""The engine thread: schedule -> run -> update, overlapped.

Step N+1 is planned and launched before step N's tokens are read, so bookkeeping hides behind the
device. All state of a worker is touched here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shared.clock import Clock
from shared.engine.core import EngineCore
from shared.engine.inbox import Inbox, Outbox
from shared.engine.observe import observe_step
from shared.engine.thread import STATUS_INTERVAL_S, EngineThread
from shared.engine.tier_costs import TierCosts
from shared.runner.base import PendingStep, Runner
from shared.scheduler.plan_builder import ScheduledStep
from shared.scheduler.scheduler import Scheduler


class _Flying(NamedTuple):
    """A step on the device; its launch has taken ``spent`` seconds of this thread."""

    step: ScheduledStep
    pending: PendingStep
    spent: float


class EngineLoop(EngineThread):
    """The thread of a prefill or decode worker."""

    def __init__(
        self,
        core: EngineCore,
        scheduler: Scheduler,
        runner: Runner,
        inbox: Inbox,
        outbox: Outbox,
        clock: Clock,
        costs: TierCosts,
        fatal: Callable[[BaseException], None],
    ) -> None:
        super().__init__(core, runner, inbox, outbox, clock, fatal)
        self._core = core
        self._scheduler = scheduler
        self._runner = runner
        self._costs = costs

    def _run(self) -> None:
        flying: _Flying | None = None
        while flying or not self._stopping.is_set():
            self._inbox.run()
            self._core.tick()
            step = self._scheduler.schedule()
            launched = self._launch(step) if step else None
            if flying:
                self._finish(flying)
            self._report()
            self._outbox.flush()
            # What came home may have made room for more, so look again before going to sleep.
            if flying is None and launched is None and not self._stopping.is_set():
                self._inbox.wait(STATUS_INTERVAL_S)
            flying = launched

    def _launch(self, step: ScheduledStep) -> _Flying:
        began = self._clock.now()
        return _Flying(step, self._runner.execute(step.plan), self._clock.now() - began)

    def _finish(self, flying: _Flying) -> None:
        began = self._clock.now()
        result = flying.pending.result()
        seconds = flying.spent + self._clock.now() - began
        self._costs.stepped(observe_step(flying.step, seconds), seconds)
        self._core.num_steps += 1
        self._core.on_outcomes(self._scheduler.update(flying.step, result))
