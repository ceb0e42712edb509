"""One span a request a worker, from its Start to its end here."""

from __future__ import annotations

from shared.telemetry.tracing import Span, Tracer
from shared.types.request import GenerationRequest


class RequestSpans:
    """Open spans by request id. Engine thread only."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._open: dict[str, Span] = {}

    def begin(self, request: GenerationRequest, name: str) -> None:
        """Open the request's span as a child of the router's."""
        span = self._tracer.span(name, parent=request.traceparent)
        span.set("prompt_tokens", len(request.token_ids))
        self._open[request.request_id] = span

    def end(self, request_id: str, **attributes: int) -> None:
        """Close it; a second call does nothing."""
        span = self._open.pop(request_id, None)
        if span is None:
            return
        for name, value in attributes.items():
            span.set(name, value)
        span.end()
