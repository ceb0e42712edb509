"""The table shows processes as the kernel and their metrics see them."""

from __future__ import annotations

import io
import os

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge
from rich.console import Console

from services.cli import procfs
from services.cli.metrics_view import Samples, scrape
from services.cli.state import ProcessRecord
from services.cli.supervisor import Row
from services.cli.table import Load, TableView, duration, load, rows_from_records
from shared.clock import ManualClock
from shared.telemetry.http import MetricsServer

PAGE = """\
# TYPE triptych_kv_blocks gauge
triptych_kv_blocks{state="free"} 90
triptych_kv_blocks{state="used"} 10
# TYPE triptych_running gauge
triptych_running 3
# TYPE triptych_requests_running gauge
triptych_requests_running 4
"""


def text_of(view: TableView, *rows: Row) -> str:
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(view.render("title", rows))
    return console.export_text()


def test_load_of_a_worker_and_of_the_router() -> None:
    samples = Samples(PAGE)
    assert load(samples, "decode") == Load(3, 0, 0.1)
    assert load(samples, "router") == Load(4, 0, None)
    assert load(None, "decode") == Load()


def test_a_row_shows_a_live_process_and_its_own_metrics() -> None:
    registry = CollectorRegistry()
    Gauge("triptych_running", "r", registry=registry).set(5)
    server = MetricsServer(registry=registry)
    port = server.start()
    view = TableView({"decode-0": f"127.0.0.1:{port}"}, ManualClock())
    try:
        text = text_of(view, Row("decode-0", "decode", "running", os.getpid(), 1, 61, None))
    finally:
        view.close()
        server.close()
    assert str(os.getpid()) in text and "1:01 min" in text and " 5 " in text and "MB" in text


def test_a_dead_process_is_shown_with_its_exit_code() -> None:
    view = TableView({})
    assert "exited (-9)" in text_of(view, Row("decode-0", "decode", "exited", 0, 0, 0.0, -9))
    view.close()


def test_a_death_counts_though_nothing_took_its_place() -> None:
    view = TableView({})
    for state, restarts in (("exited", 6), ("restarting", 6), ("running", 7)):
        row = Row("decode-0", "decode", state, 0, restarts, 0.0, None)
        assert " 7 " in text_of(view, row)
    view.close()


def test_cpu_is_a_rate_between_two_looks() -> None:
    clock = ManualClock()
    view = TableView({}, clock)
    row = Row("decode-0", "decode", "running", os.getpid(), 0, 1, None)
    assert view.read([row])[0].cpu is None
    clock.advance(1000)
    share = view.read([row])[0].cpu
    assert share is not None and 0 <= share < 0.1
    view.close()


def test_eighty_columns_show_every_column_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest that each column plausibly holds."""
    monkeypatch.setattr("services.cli.procfs.pss_bytes", lambda pid: 98_765 << 20)
    monkeypatch.setattr("services.cli.table.scrape", lambda *_: None)
    monkeypatch.setattr("services.cli.table.load", lambda *_: Load(running=256, waiting=1024, kv_used=1.0))
    view = TableView({})
    console = Console(width=80, file=io.StringIO(), record=True)
    rows = [
        Row("kv-store-0", "kv_store", "restarting", 4194303, 12, 3599.0, -11),
        Row("decode-1", "decode", "exited", 0, 0, 0.0, -9),
    ]
    console.print(view.render("title", rows, ["a remark"]))
    view.close()
    text = console.export_text()
    for whole in (
        "restarting (-11)",
        "4194303",
        "59:59 min",
        "98,765",
        "256",
        "1,024",
        "100.0",
        "exited (-9)",
    ):
        assert whole in text
    assert "\u2026" not in text and max(map(len, text.splitlines())) <= 80


def test_rows_from_pid_files_know_the_dead() -> None:
    started = procfs.start_ticks(os.getpid()) or 0
    rows = rows_from_records(
        [ProcessRecord("a", "decode", os.getpid(), started), ProcessRecord("b", "decode", 1, 5)]
    )
    assert [(row.state, row.pid) for row in rows] == [("running", os.getpid()), ("exited", 0)]


def test_a_silent_address_has_no_samples(free_port: int) -> None:
    with httpx.Client(timeout=1) as client:
        assert scrape(client, f"127.0.0.1:{free_port}") is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.9, "59 s"), (187, "3:07 min"), (7500, "2:05 h")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text
