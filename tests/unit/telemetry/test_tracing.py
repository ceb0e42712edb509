"""Spans: nothing when off; one trace through several tracers when on, exported for real over OTLP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from shared.telemetry.tracing import NullTracer, OtelTracer, Tracer, build_tracer

PARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Receives what is exported to it."""

    def __init__(self) -> None:
        self.received = threading.Event()
        self.spans: dict[str, Span] = {}
        self.resources: dict[str, dict[str, object]] = {}

    def Export(self, request: pb.ExportTraceServiceRequest, context: object) -> pb.ExportTraceServiceResponse:
        for group in request.resource_spans:
            resource = {a.key: a.value.string_value or a.value.int_value for a in group.resource.attributes}
            for scope in group.scope_spans:
                for span in scope.spans:
                    self.spans[span.name] = span
                    self.resources[span.name] = resource
        self.received.set()
        return pb.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    servicer = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None)


def attributes(span: Span) -> dict[str, object]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value") or "string_value") for a in span.attributes}


def test_without_an_endpoint_there_is_no_tracing() -> None:
    tracer = build_tracer("decode", "", pid=1)
    assert isinstance(tracer, NullTracer)
    span = tracer.span("x", PARENT, {"a": 1})
    assert span.traceparent == PARENT
    with span as inside:
        inside.set("k", 1)
        inside.fail("code")
    span.end()
    tracer.close()


def test_one_trace_through_two_services(collector: tuple[Collector, str]) -> None:
    servicer, endpoint = collector
    router: Tracer = build_tracer("router", endpoint, pid=11)
    decode: Tracer = build_tracer("decode", endpoint, pid=22, attributes={"worker.id": "d0"})
    with router.span("request", attributes={"model": "m"}) as root:
        # Started and ended by hand, elsewhere.
        span = decode.span("decode", root.traceparent)
        span.set("bytes", 123)
        span.end()
        span.end()
    router.close()
    decode.close()
    decode.close()
    request, child = servicer.spans["request"], servicer.spans["decode"]
    assert child.trace_id == request.trace_id
    assert child.parent_span_id == request.span_id
    assert not request.parent_span_id
    assert request.start_time_unix_nano <= child.start_time_unix_nano <= child.end_time_unix_nano
    assert child.end_time_unix_nano <= request.end_time_unix_nano
    assert (attributes(request), attributes(child)) == ({"model": "m"}, {"bytes": 123})
    assert servicer.resources["request"]["process.pid"] == 11
    resource = servicer.resources["decode"]
    assert (resource["service.name"], resource["process.pid"], resource["worker.id"]) == ("decode", 22, "d0")


def test_spans_leave_by_themselves(collector: tuple[Collector, str]) -> None:
    servicer, endpoint = collector
    tracer = build_tracer("decode", endpoint, pid=1)
    tracer.span("x").end()
    assert servicer.received.wait(30)
    tracer.close()


def test_a_client_s_parent_is_taken_over(collector: tuple[Collector, str]) -> None:
    servicer, endpoint = collector
    tracer = build_tracer("router", endpoint, pid=1)
    span = tracer.span("request", PARENT)
    assert span.traceparent.startswith("00-" + "a" * 32 + "-") and span.traceparent != PARENT
    span.end()
    tracer.close()
    assert servicer.spans["request"].parent_span_id == bytes.fromhex("b" * 16)


@pytest.mark.parametrize(
    "parent",
    [
        "garbage",
        "00-" + "0" * 32 + "-" + "b" * 16 + "-01",
        "00-" + "a" * 32 + "-" + "0" * 16 + "-01",
        "00-" + "A" * 32 + "-" + "b" * 16 + "-01",
        PARENT + "\n",
        "ff-" + PARENT[3:],
        "x" * 100_000,
    ],
)
def test_a_malformed_parent_begins_a_new_trace(collector: tuple[Collector, str], parent: str) -> None:
    servicer, endpoint = collector
    tracer = build_tracer("router", endpoint, pid=1)
    tracer.span("request", parent).end()
    tracer.close()
    assert not servicer.spans["request"].parent_span_id


def test_an_error_marks_the_span_without_its_text(collector: tuple[Collector, str]) -> None:
    servicer, endpoint = collector
    tracer = build_tracer("router", endpoint, pid=1)
    with pytest.raises(ValueError), tracer.span("request"):
        raise ValueError("my secret")
    tracer.close()
    status = servicer.spans["request"].status
    assert (status.code, status.message) == (Status.STATUS_CODE_ERROR, "ValueError")
    assert b"secret" not in servicer.spans["request"].SerializeToString()


def test_a_collector_that_is_not_there_hurts_nobody(free_port: int) -> None:
    tracer = build_tracer("router", f"127.0.0.1:{free_port}", pid=1)
    assert isinstance(tracer, OtelTracer)
    tracer.span("request").end()
    tracer.close()
    tracer.span("late").end()
