"""One request's trace as a timeline, and what it must prove: pure functions on received spans.

Names and attributes of spans are those of the services: "request" (router), "encode" (encoder),
"embedding.transfer" and "prefill" (prefill), "kv.transfer" and "decode" (decode).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.table import Table

Attribute = str | int | float | bool

PHASES = {
    "request": "gateway, router",
    "encode": "encode",
    "embedding.transfer": "embedding transfer",
    "prefill": "prefill",
    "kv.transfer": "KV transfer",
    "decode": "decode",
}


@dataclass(frozen=True)
class SpanRecord:
    """One finished span; times in nanoseconds of the wall clock, ids in hex."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    service: str = ""
    pid: int = 0
    attributes: Mapping[str, Attribute] = field(default_factory=dict)

    def number(self, name: str) -> int:
        """An integer attribute; 0 when it is missing or no number."""
        value = self.attributes.get(name, 0)
        return int(value) if isinstance(value, int | float) else 0


@dataclass(frozen=True)
class Expected:
    """What the trace of a disaggregated request with a picture must show."""

    prompt_tokens: int
    block_size: int
    extent_bytes: int


def picture_trace(spans: Iterable[SpanRecord]) -> list[SpanRecord]:
    """The spans of the latest request that encoded something, by start; empty when there is none."""
    everything = list(spans)
    encodes = [span for span in everything if span.name == "encode"]
    if not encodes:
        return []
    trace_id = max(encodes, key=lambda span: span.start_ns).trace_id
    return sorted((span for span in everything if span.trace_id == trace_id), key=lambda span: span.start_ns)


def is_complete(trace: Sequence[SpanRecord]) -> bool:
    """Whether every phase has reported."""
    return PHASES.keys() <= {span.name for span in trace}


def nbytes(span: SpanRecord) -> int:
    """Bytes that the span says were moved."""
    return span.number("embedding.bytes") + span.number("kv.bytes")


def problems(trace: Sequence[SpanRecord], expected: Expected) -> list[str]:
    """Everything the trace fails to prove, in words."""
    by_name = {span.name: span for span in trace}
    missing = [title for name, title in PHASES.items() if name not in by_name]
    if missing:
        return [f"the trace has no span for: {', '.join(missing)}"]
    found = []
    if by_name["embedding.transfer"].number("embedding.bytes") <= 0:
        found.append("no embedding bytes were moved")
    transfer = by_name["kv.transfer"]
    num_blocks = -(-expected.prompt_tokens // expected.block_size) - transfer.number("kv.blocks_held")
    wanted, moved = num_blocks * expected.extent_bytes, transfer.number("kv.bytes")
    if moved <= 0 or moved != wanted:
        found.append(f"{moved:,} KV bytes were moved, expected {wanted:,} ({num_blocks} blocks)")
    pids = [by_name[name].pid for name in ("encode", "prefill", "decode")]
    if len(set(pids)) != 3 or 0 in pids:
        found.append(f"encode, prefill and decode did not run in three processes (pids {pids})")
    return found


def render(trace: Sequence[SpanRecord], width: int = 14) -> Table:
    """Phases in order of their start, with a bar on the request's own time."""
    table = Table(
        title="Timeline of the picture request",
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for name in ("phase", "pid", "from ms", "ms", "bytes", ""):
        table.add_column(name, justify="right" if name not in {"phase", ""} else "left", no_wrap=True)
    origin = min((span.start_ns for span in trace), default=0)
    total = max((span.end_ns - origin for span in trace), default=0) or 1
    for span in trace:
        if span.name not in PHASES:
            continue
        start, length = span.start_ns - origin, span.end_ns - span.start_ns
        table.add_row(
            PHASES[span.name],
            str(span.pid),
            f"{start / 1e6:,.1f}",
            f"{length / 1e6:,.1f}",
            f"{nbytes(span):,}" if nbytes(span) else "",
            _bar(start / total, length / total, width),
        )
    return table


def _bar(start: float, length: float, width: int) -> str:
    first = min(width - 1, int(start * width))
    return " " * first + "█" * max(1, min(width - first, round(length * width)))
