"""A placement on trial: what was predicted of it, and what came. Owns the moments that count; the estimates
are ``cost``'s.
"""

from __future__ import annotations

from shared.clock import Clock
from shared.routing.cost import CostModel
from shared.routing.policy import Placement
from shared.telemetry import metrics


class MeasuredCosts:
    """The cost model on the clock of this process, as the policy asks it."""

    def __init__(self, clock: Clock, model: CostModel | None = None) -> None:
        self.clock = clock
        self.model = model or CostModel()

    def apart(self, prefill: str, decode: str, work: float, moved: float) -> float | None:
        return self.model.apart(prefill, decode, work, moved, self.clock.now())

    def alone(self, worker: str, work: float, num_streams: int) -> tuple[float, float] | None:
        return self.model.alone(worker, work, num_streams, self.clock.now())


class Trial:
    """Follows one attempt from the moment its workers are told until it is rolling. Unknown while its media
    are still encoded: ``begin`` starts the watch."""

    def __init__(self, costs: MeasuredCosts, placement: Placement) -> None:
        self._costs = costs
        self._placement = placement
        self._moved = placement.moved
        self._began: float | None = None
        self._first: float | None = None
        self._first_index: int | None = None
        self._over = False

    def begin(self) -> None:
        """The workers are told now."""
        self._began = self._costs.clock.now()

    def moves(self, num_tokens: int) -> None:
        """So many tokens will really be handed over."""
        self._moved = float(num_tokens)

    def prefilled(self) -> None:
        """The first token came from the prefill worker."""
        if self._began is not None and self._first is None:
            self._first = now = self._costs.clock.now()
            self._costs.model.prefilled(self._placement.prefill, self._placement.work, now - self._began, now)

    def decoded(self, first_index: int) -> None:
        """A token of the decode worker's own, the ``first_index``-th of its choice."""
        if self._over or self._began is None:
            return
        now, placement = self._costs.clock.now(), self._placement
        if placement.prefill:
            if self._first is None:
                return
            self._costs.model.handed_off(placement.decode, self._moved, now - self._first, now)
        elif self._first_index in (None, first_index):
            # Alone, the first token is the prompt's: rolling begins with the one after it.
            self._first_index = first_index
            return
        else:
            self._costs.model.served_alone(placement.decode, placement.work, now - self._began, now)
        self._over = True
        self._report(now - self._began)

    def _report(self, actual_s: float) -> None:
        choice = "apart" if self._placement.prefill else "alone"
        metrics.DECISIONS.labels(choice).inc()
        predicted = self._placement.predicted_s
        if predicted is not None:
            metrics.DECISION_COST.labels(choice, "predicted").observe(predicted)
            metrics.DECISION_COST.labels(choice, "actual").observe(actual_s)
