"""The router's core: takes client requests, places their attempts, hands the workers' events out.

Owns the maps from ids to flights and attempts, and the periodic work (deadlines, leases, liveness).
How a request is rendered is the model's part, what happens to it is the flight's and the attempt's,
which workers serve it is decided by ``shared.routing``. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from services.router.attempt import Attempt, Route
from services.router.flight import Flight
from services.router.intake import Intake
from services.router.model import ServedModel
from services.router.probe import RequestProbe
from shared.clock import Clock, Entropy
from shared.config.services import LimitsConfig, RoutingConfig
from shared.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    Overloaded,
    TriptychError,
)
from shared.routing.admission import Admission
from shared.routing.placer import Placer
from shared.routing.trial import MeasuredCosts, Trial
from shared.routing.workers import Worker, WorkerLink, WorkerPool
from shared.telemetry import metrics
from shared.telemetry.logs import get_logger
from shared.telemetry.tracing import Tracer
from shared.types.inference import InferenceRequest, ModelCard, Output
from shared.types.worker import (
    BlocksCommitted,
    Event,
    Failed,
    HandoffReady,
    Released,
    Renew,
    Reserved,
    Tokens,
    WorkerInfo,
)

logger = get_logger(__name__)

#: Leases are renewed this many times before they would run out.
RENEWALS_PER_LEASE = 6
TICK_S = 0.1


class Dispatcher:
    """The InferenceService of this process. ``wall_clock`` gives seconds since 1970, for answers only."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        dial: Callable[[WorkerInfo, int], WorkerLink],
        *,
        clock: Clock,
        entropy: Entropy,
        tracer: Tracer,
        wall_clock: Callable[[], int],
        routing: RoutingConfig,
        limits: LimitsConfig,
        lease_s: float,
    ) -> None:
        self._clock = clock
        self._tracer = tracer
        self._routing = routing
        self._limits = limits
        self._renew_every_s = lease_s / RENEWALS_PER_LEASE
        self._renew_at = clock.now()
        self._flights: set[Flight] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._drain_by = float("inf")
        self._attempts: dict[str, Attempt] = {}
        self._waiting: dict[str, Attempt] = {}
        self._handlers: dict[type, Callable[[Attempt, Worker, Any], None]] = {
            Tokens: Attempt.on_tokens,
            BlocksCommitted: Attempt.on_blocks,
            HandoffReady: Attempt.on_handoff,
            Failed: Attempt.on_failed,
            Released: Attempt.on_released,
            Reserved: Attempt.on_reserved,
        }
        self.workers = WorkerPool(dial, clock, self, routing)
        self.admission = Admission(limits, clock)
        self._costs = MeasuredCosts(clock)
        self._placer = Placer(self._costs if routing.placement == "cost" else None)
        self._intake = Intake(models, self.workers, entropy, wall_clock)

    # InferenceService.

    async def generate(self, request: InferenceRequest) -> AsyncIterator[list[Output]]:
        received = self._clock.now()
        span = self._tracer.span("request", request.traceparent, {"model": request.model, "n": request.n})
        probe = RequestProbe(self._clock, span, received)
        deadline = received + (request.deadline_s or self._limits.default_deadline_s)
        try:
            model = self._intake.check(request)
            await self.admission.enter(deadline)
            try:
                order = await self._intake.render(model, request, probe)
                flight = Flight(self, self._routing, order, deadline, probe)
                self._flights.add(flight)
                self._idle.clear()
                try:
                    flight.start()
                    while outputs := await flight.next_outputs():
                        yield outputs
                finally:
                    flight.close()
                    self._flights.discard(flight)
                    if not self._flights:
                        self._idle.set()
            finally:
                self.admission.leave()
        except TriptychError as error:
            probe.ended(error, 0)
            raise
        finally:
            probe.ended(Cancelled("the client went away"), 0)

    async def models(self) -> list[ModelCard]:
        return self._intake.cards()

    async def token_text(self, model: str, token_ids: tuple[int, ...]) -> list[bytes]:
        return self._intake.model(model).token_text(token_ids)

    async def ready(self) -> bool:
        if self.admission.draining:
            return False
        kinds = {(w.info.model, w.info.kind) for w in self.workers.usable().values()}
        return all(
            (m.name, phase) in kinds
            for m in self._intake.models
            for phase in self._routing.phases
            if m.vision or phase != "encoder"
        )

    # Periodic work and shutdown.

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.tick()
            except Exception:
                logger.exception("tick failed")

    def tick(self) -> None:
        """Deadlines, leases, liveness, and whoever waits for a worker; ten times a second."""
        now = self._clock.now()
        self.workers.tick()
        self.admission.tick()
        for flight in list(self._flights):
            if flight.deadline <= now:
                flight.fail(DeadlineExceeded("the request's deadline has passed"))
            elif self._drain_by <= now:
                flight.fail(Overloaded("the server is shutting down", code="shutting_down"))
        self._place_waiting()
        if now >= self._renew_at:
            self._renew_at = now + self._renew_every_s
            self._renew()

    async def drain(self, timeout_s: float) -> None:
        """Let nobody in; returns once the running requests are over. Those that are not after
        ``timeout_s`` end with a typed error at the next tick."""
        self.admission.drain()
        self._drain_by = self._clock.now() + timeout_s
        await self._idle.wait()

    def census(self) -> dict[str, int]:
        """How many entries each map holds; all zero at rest."""
        return {
            "flights": len(self._flights),
            "attempts": len(self._attempts),
            "waiting": len(self._waiting),
            "running": self.admission.num_running,
            "queued": self.admission.num_waiting,
            "carried": sum(len(w.attempts) for w in self.workers.live()),
        }

    # WorkerListener.

    def deliver(self, worker: Worker, events: list[Event]) -> None:
        """Hand events to their attempts. What belongs to no attempt came too late and is dropped.

        An error ends the request that it belongs to, never the stream.
        """
        attempts, handlers = self._attempts, self._handlers
        for event in events:
            handler = handlers.get(type(event))
            if handler is None:
                continue
            attempt = attempts.get(event.request_id)  # type: ignore[union-attr]
            if attempt is None:
                metrics.LATE_EVENTS.inc()
                continue
            try:
                handler(attempt, worker, event)
            except TriptychError as error:
                logger.error("request failed at the router", code=error.code)
                attempt.flight.fail(error)
            except Exception:
                logger.exception("event could not be handled", event=type(event).__name__)
                attempt.flight.fail(InternalError("internal error"))

    def worker_ready(self, worker: Worker) -> None:
        logger.info("worker ready", worker=worker.info.worker_id, kind=worker.info.kind)
        self._placer.started(worker.info.worker_id, worker.key, worker.info.recalled)
        self._place_waiting()

    def worker_lost(self, worker: Worker) -> None:
        for attempt in list(worker.attempts.values()):
            attempt.worker_lost(worker)
        worker.attempts.clear()

    # Attempts (for flights).

    def now(self) -> float:
        return self._clock.now()

    def submit(self, attempt: Attempt) -> None:
        if attempt.not_before > self._clock.now() or not self._place(attempt):
            self._waiting[attempt.id] = attempt

    def forget(self, attempt: Attempt) -> None:
        self._attempts.pop(attempt.id, None)
        self._waiting.pop(attempt.id, None)

    def _place_waiting(self) -> None:
        now = self._clock.now()
        for attempt in list(self._waiting.values()):
            if attempt.closed or attempt.not_before > now:
                continue
            if self._place(attempt):
                self._waiting.pop(attempt.id, None)
            elif now - attempt.waiting_since >= self._limits.no_worker_wait_s:
                attempt.flight.fail(Overloaded("no worker is available"))

    def _place(self, attempt: Attempt) -> bool:
        """Choose workers and begin; False when there are none."""
        workers = self.workers.usable()
        request = attempt.flight.request_for(attempt)
        placement = self._placer.place([w.view() for w in workers.values()], request, attempt.avoid)
        if placement is None:
            return False
        route = Route(
            workers[placement.decode],
            Trial(self._costs, placement),
            workers.get(placement.prefill),
            tuple((workers[key], hashes) for key, hashes in placement.encoders),
        )
        self._attempts[attempt.id] = attempt
        try:
            attempt.begin(route, request)
        except TriptychError as error:  # too large for a message
            attempt.flight.fail(error)
        return True

    def _renew(self) -> None:
        wanted: dict[Worker, tuple[list[str], list[str]]] = {}
        for attempt in self._attempts.values():
            for worker, handoff_ids in attempt.leases():
                handoffs, requests = wanted.setdefault(worker, ([], []))
                handoffs += handoff_ids
                requests.append(attempt.id)
        for worker, (handoffs, requests) in wanted.items():
            worker.send(Renew(tuple(handoffs), tuple(requests)))
