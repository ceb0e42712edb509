"""What one request leaves in metrics and traces. Owns no decision."""

from __future__ import annotations

from shared.clock import Clock
from shared.errors import TriptychError
from shared.telemetry import metrics
from shared.telemetry.outcome import outcome_of
from shared.telemetry.tracing import Span


class RequestProbe:
    """``received`` in clock seconds: when the request came in, before admission."""

    def __init__(self, clock: Clock, span: Span, received: float) -> None:
        self._clock = clock
        self._span = span
        self._received = received
        self._last: dict[int, float] = {}
        self._ended = False

    @property
    def traceparent(self) -> str:
        """The request's span, as parent of the workers' spans."""
        return self._span.traceparent

    def admitted(self, request_id: str, num_prompt_tokens: int) -> None:
        metrics.PROMPT_TOKENS.inc(num_prompt_tokens)
        self._span.set("request_id", request_id)
        self._span.set("prompt_tokens", num_prompt_tokens)

    def tokens(self, choice: int) -> None:
        """New tokens of a choice are on their way to the client."""
        now = self._clock.now()
        last = self._last.get(choice)
        if last is not None:
            metrics.ITL.observe(now - last)
        elif not self._last:
            metrics.TTFT.observe(now - self._received)
            self._span.set("ttft_ms", (now - self._received) * 1e3)
        self._last[choice] = now

    def migrated(self, phase: str) -> None:
        """The request goes on elsewhere since a worker of this kind failed it."""
        metrics.MIGRATIONS.labels(phase).inc()

    def ended(self, error: TriptychError | None, num_tokens: int) -> None:
        """The request is over; ``error`` None = served. Only the first call counts."""
        if self._ended:
            return
        self._ended = True
        metrics.COMPLETION_TOKENS.inc(num_tokens)
        self._span.set("completion_tokens", num_tokens)
        if error is None:
            metrics.E2E.observe(self._clock.now() - self._received)
        else:
            self._span.fail(error.code)
        metrics.REQUESTS.labels(outcome_of(error)).inc()
        self._span.end()
