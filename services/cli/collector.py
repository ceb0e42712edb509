"""An OTLP collector inside this process: receives spans over gRPC and keeps them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from services.cli.timeline import Attribute, SpanRecord


class SpanCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens on a free port of 127.0.0.1 while used as a context manager. Safe for any thread."""

    def __init__(self) -> None:
        self._spans: list[SpanRecord] = []
        self._arrived = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(max_workers=2, thread_name_prefix="collector"))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(grace=None).wait()

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Take a batch of spans; called by the gRPC server."""
        found = [
            _record(span, _plain(batch.resource.attributes))
            for batch in request.resource_spans
            for scope in batch.scope_spans
            for span in scope.spans
        ]
        with self._arrived:
            self._spans.extend(found)
            self._arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self) -> list[SpanRecord]:
        """Everything received so far."""
        with self._arrived:
            return list(self._spans)

    def wait_for(self, enough: Callable[[Sequence[SpanRecord]], bool], timeout_s: float) -> bool:
        """Block until ``enough`` of all spans so far; False when that did not happen in time."""
        with self._arrived:
            return self._arrived.wait_for(lambda: enough(self._spans), timeout_s)


def _record(span: Any, resource: dict[str, Attribute]) -> SpanRecord:
    return SpanRecord(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        service=str(resource.get("service.name", "")),
        pid=int(resource.get("process.pid", 0)),
        attributes=_plain(span.attributes),
    )


def _plain(pairs: Any) -> dict[str, Attribute]:
    """OTLP key-value pairs of scalars as a dict; other kinds of values are left out."""
    kinds = ("string_value", "int_value", "double_value", "bool_value")
    found = ((pair.key, pair.value.WhichOneof("value"), pair.value) for pair in pairs)
    return {key: getattr(value, kind) for key, kind, value in found if kind in kinds}
