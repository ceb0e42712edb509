"""A thin seam over tracing: spans with a W3C traceparent, and nothing when tracing is off.

Owns span creation and export. Which spans exist is for their makers to say; context travels as the
plain ``traceparent`` text of requests, never in thread-local state.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from opentelemetry import trace as otel
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

Attribute = str | int | float | bool
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
#: Spans leave the process at most this long after their end.
EXPORT_DELAY_MS = 200
EXPORT_TIMEOUT_S = 2


class Span(Protocol):
    """One timed piece of work. Ended once: by ``end`` or by leaving its ``with`` block, whichever is
    first; an exception that leaves the block marks it as failed. May end in another thread."""

    @property
    def traceparent(self) -> str:
        """Names this span as a parent; empty when there is none to name."""
        ...

    def set(self, key: str, value: Attribute) -> None:
        """Add an attribute; never prompt text."""
        ...

    def fail(self, reason: str) -> None:
        """Mark the work as failed; ``reason`` is an error code."""
        ...

    def end(self) -> None:
        """Stop the time. Further calls do nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Tracer(Protocol):
    """Makes spans; any thread."""

    def span(self, name: str, parent: str = "", attributes: Mapping[str, Attribute] | None = None) -> Span:
        """Start a span now, below ``parent`` (a traceparent; empty or malformed = a new trace)."""
        ...

    def close(self) -> None:
        """Flush and stop. Spans made afterwards go nowhere. Calling it twice is safe."""
        ...


class NullSpan:
    """A span that hands its parent on, so that tracing can be off in one service only."""

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent

    def set(self, key: str, value: Attribute) -> None:
        pass

    def fail(self, reason: str) -> None:
        pass

    def end(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class NullTracer:
    """Tracing is off."""

    def span(self, name: str, parent: str = "", attributes: Mapping[str, Attribute] | None = None) -> Span:
        return NullSpan(parent)

    def close(self) -> None:
        pass


class OtelSpan:
    """A span of the OpenTelemetry SDK."""

    def __init__(self, span: otel.Span) -> None:
        self._span = span
        self._ended = False

    @property
    def traceparent(self) -> str:
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def set(self, key: str, value: Attribute) -> None:
        self._span.set_attribute(key, value)

    def fail(self, reason: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_status(Status(StatusCode.ERROR, reason))

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._span.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            # The class alone: an error's message may quote what a client sent.
            self.fail(kind.__name__)
        self.end()


class OtelTracer:
    """Exports spans through the OpenTelemetry SDK, in batches from a background thread."""

    def __init__(self, service: str, exporter: SpanExporter, attributes: Mapping[str, Attribute]) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": service, **attributes})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=EXPORT_DELAY_MS))
        self._tracer = self._provider.get_tracer("triptych")
        self._closed = False

    def span(self, name: str, parent: str = "", attributes: Mapping[str, Attribute] | None = None) -> Span:
        return OtelSpan(self._tracer.start_span(name, _context(parent), attributes=attributes))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._provider.shutdown()


def build_tracer(
    service: str, otlp_endpoint: str, *, pid: int, attributes: Mapping[str, Attribute] | None = None
) -> Tracer:
    """The tracer of a service: OTLP over gRPC to ``otlp_endpoint`` ("host:port"), none when empty."""
    if not otlp_endpoint:
        return NullTracer()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    exporter = OTLPSpanExporter(endpoint=otlp_endpoint, insecure=True, timeout=EXPORT_TIMEOUT_S)
    return OtelTracer(service, exporter, {"process.pid": pid, **(attributes or {})})


def _context(traceparent: str) -> Context:
    """The remote parent as a context that replaces the thread's own; an empty one when malformed."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None:
        return Context()
    trace_id, span_id, flags = (int(part, 16) for part in match.groups())
    remote = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
    return set_span_in_context(NonRecordingSpan(remote), Context()) if remote.is_valid else Context()
