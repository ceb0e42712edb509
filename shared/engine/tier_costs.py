"""Whether a stored prefix is loaded or computed anew: by what both took here lately.

Owns this worker's estimates. What is not known is loaded, so that it gets known.
"""

from __future__ import annotations

from shared.clock import Clock
from shared.routing.cost import Line
from shared.telemetry import metrics


class TierCosts:
    """Engine thread only, but for ``now``. ``step_tokens``: the token budget of a step."""

    def __init__(self, clock: Clock, step_tokens: int) -> None:
        self._clock = clock
        self._step_tokens = step_tokens
        self._steps = Line()
        self._loads = Line(proportional=False)

    def now(self) -> float:
        """Seconds of the injected clock; any thread."""
        return self._clock.now()

    def stepped(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        self._steps.add(num_tokens, seconds, self._clock.now())

    def prefers_loading(self, num_tokens: int) -> bool:
        """Whether to ask the store for ``num_tokens`` of a prompt; counts the decision."""
        load, compute = self.load_s(num_tokens), self.compute_s(num_tokens)
        loads = load is None or compute is None or load <= compute
        metrics.DECISIONS.labels("load" if loads else "compute").inc()
        return loads

    def loaded(self, num_tokens: int, seconds: float) -> None:
        """Blocks of so many tokens have arrived, so long after the store was asked for them."""
        predicted = self.load_s(num_tokens)
        if predicted is not None:
            metrics.DECISION_COST.labels("load", "predicted").observe(predicted)
            metrics.DECISION_COST.labels("load", "actual").observe(seconds)
        self._loads.add(num_tokens, seconds, self._clock.now())

    def load_s(self, num_tokens: int) -> float | None:
        """Seconds from asking to having; None: not measured lately."""
        return self._loads.predict(num_tokens, self._clock.now())

    def compute_s(self, num_tokens: int) -> float | None:
        """Seconds of steps; None: not measured lately."""
        now = self._clock.now()
        full, rest = divmod(num_tokens, self._step_tokens)
        whole, part = self._steps.predict(self._step_tokens, now), self._steps.predict(rest, now)
        if whole is None or part is None:
            return None
        return full * whole + (part if rest else 0.0)
