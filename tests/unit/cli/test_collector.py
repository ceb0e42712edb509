"""Spans made by the services' own tracer arrive in the collector whole."""

from __future__ import annotations

from services.cli.collector import SpanCollector
from shared.telemetry.tracing import build_tracer


def test_spans_arrive_with_process_attributes_and_parents() -> None:
    with SpanCollector() as collector:
        tracer = build_tracer("decode", collector.endpoint, pid=77)
        parent = tracer.span("request")
        with tracer.span("kv.transfer", parent=parent.traceparent) as child:
            child.set("kv.bytes", 12)
            child.set("transfer.backend", "shm")
        parent.end()
        tracer.close()
        assert collector.wait_for(lambda spans: len(spans) == 2, timeout_s=10)
        by_name = {span.name: span for span in collector.spans()}
    transfer, request = by_name["kv.transfer"], by_name["request"]
    assert transfer.parent_id == request.span_id and transfer.trace_id == request.trace_id
    assert (transfer.service, transfer.pid) == ("decode", 77)
    assert transfer.number("kv.bytes") == 12 and transfer.attributes["transfer.backend"] == "shm"
    assert transfer.end_ns >= transfer.start_ns > 0


def test_waiting_for_what_does_not_come_says_so() -> None:
    with SpanCollector() as collector:
        assert not collector.wait_for(lambda spans: bool(spans), timeout_s=0.01)
