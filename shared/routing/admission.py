"""How many requests run and how many may wait: counted at arrival, before any work is spent on them.

Owns the places and the queue in front of them. First come, first served.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from shared.clock import Clock
from shared.config.services import LimitsConfig
from shared.errors import DeadlineExceeded, Overloaded
from shared.telemetry import metrics


class Admission:
    """``enter`` and ``leave`` are called on the event loop, one ``leave`` for each ``enter`` that
    returned."""

    def __init__(self, config: LimitsConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._waiting: OrderedDict[asyncio.Future[None], float] = OrderedDict()
        self.draining = False
        self.num_running = 0

    async def enter(self, deadline: float) -> None:
        """Take a place, waiting for one if need be. Raises Overloaded at once when the queue is full
        or the router is going down, DeadlineExceeded when no place came free before ``deadline``."""
        if self.draining:
            raise Overloaded("the server is shutting down", code="shutting_down")
        if self.num_running >= self._config.max_running:
            if len(self._waiting) >= self._config.max_queued:
                raise Overloaded("too many requests are waiting")
            await self._wait(deadline)
        else:
            self._take()

    def leave(self) -> None:
        """Give the place to the first in the queue, or back."""
        while self._waiting:
            place, _ = self._waiting.popitem(last=False)
            if not place.done():
                place.set_result(None)
                return
        self.num_running -= 1
        metrics.REQUESTS_RUNNING.set(self.num_running)

    def tick(self) -> None:
        """Turn away whose deadline has passed."""
        now = self._clock.now()
        for place, deadline in list(self._waiting.items()):
            if deadline <= now and not place.done():
                place.set_exception(DeadlineExceeded("no capacity before the deadline"))

    def drain(self) -> None:
        """Let nobody in any more; who waits is turned away."""
        self.draining = True
        for place in self._waiting:
            if not place.done():
                place.set_exception(Overloaded("the server is shutting down", code="shutting_down"))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def _wait(self, deadline: float) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[place] = deadline
        metrics.REQUESTS_QUEUED.set(len(self._waiting))
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.leave()  # the place came in the same moment
            raise
        finally:
            self._waiting.pop(place, None)
            metrics.REQUESTS_QUEUED.set(len(self._waiting))

    def _take(self) -> None:
        self.num_running += 1
        metrics.REQUESTS_RUNNING.set(self.num_running)
