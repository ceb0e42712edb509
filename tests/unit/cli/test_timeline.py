"""A trace proves disaggregation only when bytes, blocks and processes add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from rich.console import Console

from services.cli.timeline import (
    Attribute,
    Expected,
    SpanRecord,
    is_complete,
    picture_trace,
    problems,
    render,
)

EXPECTED = Expected(prompt_tokens=102, block_size=16, extent_bytes=1000)


def span(name: str, pid: int, start: int, trace: str = "t", **attributes: Attribute) -> SpanRecord:
    named: Mapping[str, Attribute] = {key.replace("__", "."): value for key, value in attributes.items()}
    return SpanRecord(
        name, trace, f"{name}-{start}", "", start * 10**6, (start + 5) * 10**6, name, pid, named
    )


def trace() -> list[SpanRecord]:
    """A request of 102 tokens: 7 blocks, of which decode held 2."""
    return [
        span("request", 1, 0),
        span("encode", 2, 1),
        span("embedding.transfer", 3, 6, embedding__bytes=64),
        span("prefill", 3, 7),
        span("kv.transfer", 4, 7, kv__bytes=5000, kv__blocks_held=2),
        span("decode", 4, 12),
    ]


def changed(name: str, **attributes: Attribute) -> list[SpanRecord]:
    new = span(name, next(s.pid for s in trace() if s.name == name), 0, **attributes)
    return [replace(s, attributes=new.attributes) if s.name == name else s for s in trace()]


def test_a_good_trace_has_no_problems() -> None:
    assert is_complete(trace()) and problems(trace(), EXPECTED) == []


@pytest.mark.parametrize("name", [s.name for s in trace()])
def test_a_missing_phase_is_a_problem(name: str) -> None:
    rest = [s for s in trace() if s.name != name]
    assert not is_complete(rest) and len(problems(rest, EXPECTED)) == 1


@pytest.mark.parametrize(
    "broken",
    [
        changed("embedding.transfer", embedding__bytes=0),
        changed("kv.transfer", kv__bytes=7000, kv__blocks_held=2),
        changed("kv.transfer", kv__bytes=0, kv__blocks_held=7),
        changed("kv.transfer"),
        [replace(s, pid=3) if s.pid == 4 else s for s in trace()],
        [replace(s, pid=0) if s.pid == 2 else s for s in trace()],
    ],
)
def test_bytes_blocks_and_processes_must_add_up(broken: list[SpanRecord]) -> None:
    assert len(problems(broken, EXPECTED)) == 1


def test_the_latest_request_with_a_picture_is_chosen_and_sorted() -> None:
    earlier = [replace(s, trace_id="old", start_ns=s.start_ns - 10**9) for s in trace()]
    text = [span("request", 1, 90, trace="text"), span("prefill", 3, 91, trace="text")]
    found = picture_trace([*reversed(trace()), *text, *earlier])
    assert {s.trace_id for s in found} == {"t"}
    assert [s.start_ns for s in found] == sorted(s.start_ns for s in found)
    assert picture_trace(text) == []


def test_the_table_shows_phases_processes_times_and_bytes() -> None:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(picture_trace(trace())))
    console.file.close()
    lines = console.export_text()
    for text in ("gateway, router", "encode", "embedding transfer", "KV transfer", "5,000", "12.0"):
        assert text in lines
