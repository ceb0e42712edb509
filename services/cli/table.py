"""The status table: processes, their memory and CPU from the kernel, their load from their metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import httpx
from rich import box
from rich.table import Table

from services.cli import procfs
from services.cli.metrics_view import Samples, scrape
from services.cli.state import Deployed, ProcessRecord
from services.cli.supervisor import Row
from shared.clock import Clock, MonotonicClock

_STYLES = {"running": "green", "restarting": "yellow", "exited": "red"}


class TableView:
    """Makes a table of the present; remembers the last CPU times to show a rate. One thread."""

    def __init__(self, metrics: Mapping[str, str], clock: Clock | None = None) -> None:
        """``metrics`` are metrics addresses by process name."""
        self._metrics = metrics
        self._clock = clock or MonotonicClock()
        self._client = httpx.Client(timeout=1.0, trust_env=False)
        self._cpu: dict[int, tuple[float, float]] = {}

    def close(self) -> None:
        self._client.close()

    def render(self, title: str, rows: Sequence[Row]) -> Table:
        """One line a process."""
        table = Table(
            title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
        )
        for name in ("process", "state", "pid", "up", "died", "memory", "cpu", "run", "wait", "KV used"):
            left = name in {"process", "state"}
            table.add_column(name, justify="left" if left else "right", no_wrap=True)
        for row in rows:
            style = _STYLES.get(row.state, "")
            state = row.state if row.exit_code is None else f"{row.state} ({row.exit_code})"
            table.add_row(row.name, f"[{style}]{state}[/]" if style else state, *self._numbers(row))
        return table

    def _numbers(self, row: Row) -> list[str]:
        samples = (
            scrape(self._client, self._metrics[row.name]) if row.pid and row.name in self._metrics else None
        )
        return [
            str(row.pid or "-"),
            duration(row.uptime_s) if row.pid else "-",
            str(row.restarts),
            f"{procfs.pss_bytes(row.pid) / 2**20:,.0f} MB" if row.pid else "-",
            self._cpu_share(row.pid),
            *load(samples, row.kind),
        ]

    def _cpu_share(self, pid: int) -> str:
        if not pid:
            return "-"
        now, used = self._clock.now(), procfs.cpu_seconds(pid)
        before, used_before = self._cpu.get(pid, (now, used))
        self._cpu[pid] = (now, used)
        return f"{100 * (used - used_before) / (now - before):.0f} %" if now > before else "-"


def load(samples: Samples | None, kind: str) -> list[str]:
    """Requests running, requests waiting, share of KV blocks in use, as text."""
    if samples is None:
        return ["-", "-", "-"]
    if kind == "router":
        running, waiting = (
            samples.total("triptych_requests_running"),
            samples.total("triptych_requests_queued"),
        )
        return [f"{running:.0f}", f"{waiting:.0f}", "-"]
    used = samples.value("triptych_kv_blocks", state="used")
    total = samples.total("triptych_kv_blocks")
    blocks = f"{100 * used / total:.1f} %" if total else "-"
    return [f"{samples.total('triptych_running'):.0f}", f"{samples.total('triptych_waiting'):.0f}", blocks]


def rows_from_records(records: Sequence[ProcessRecord]) -> list[Row]:
    """Rows as seen from outside the launcher: from its pid files."""
    return [
        Row(
            name=record.name,
            kind=record.kind,
            state="running" if record.alive else "exited",
            pid=record.pid if record.alive else 0,
            restarts=record.restarts,
            uptime_s=procfs.uptime_s(record.started),
            exit_code=None,
        )
        for record in records
    ]


def title(deployed: Deployed) -> str:
    """The line above the table."""
    return f"{deployed.model}   OpenAI {deployed.http}/v1   gRPC {deployed.grpc}"


def duration(seconds: float) -> str:
    """Like 42 s, 3:07 min or 2:05 h."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"
