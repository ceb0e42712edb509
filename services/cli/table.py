"""The status table: processes, their memory and CPU from the kernel, their load from their metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import httpx
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.cli import procfs
from services.cli.metrics_view import Samples, scrape
from services.cli.state import Deployed, ProcessRecord
from services.cli.supervisor import Row
from shared.clock import Clock, MonotonicClock

_STYLES = {"running": "green", "restarting": "yellow", "exited": "red"}
#: Units stand in the header, so that a row fits into 80 columns.
_COLUMNS = ("process", "state", "pid", "up", "died", "MB", "CPU%", "run", "wait", "KV%")
#: Columns that every terminal has.
_NARROW = 80
#: Columns of what goes to a file or another program, which wraps nothing.
_WIDE = 200


@dataclass(frozen=True)
class Load:
    """Requests running and waiting, and the share of KV blocks in use; None = not known, or none there."""

    running: int | None = None
    waiting: int | None = None
    kv_used: float | None = None


@dataclass(frozen=True)
class Reading:
    """A row with what kernel and metrics say of it now. ``cpu`` is the share of one core."""

    row: Row
    memory_bytes: int | None
    cpu: float | None
    load: Load


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

    def read(self, rows: Sequence[Row]) -> list[Reading]:
        """Look at every process once."""
        return [self._reading(row) for row in rows]

    def render(self, title: str, rows: Sequence[Row], remarks: Sequence[str] = ()) -> RenderableType:
        """One line a process, below the title and whatever else is to be said."""
        lines_of_cells = [_cells(reading) for reading in self.read(rows)]
        widths = [max(map(len, column)) for column in zip(_COLUMNS, *lines_of_cells, strict=True)]
        fits = sum(widths) + 2 * len(widths) <= _NARROW
        table = Table(header_style="bold", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, int(fits), 0, 0))
        for name in _COLUMNS:
            left = name in {"process", "state"}
            table.add_column(name, justify="left" if left else "right", no_wrap=True)
        for cells in lines_of_cells:
            table.add_row(*cells)
        lines = [Text(title, "italic")] if title else []
        return Group(*lines, *(Text(remark, "yellow") for remark in remarks), table)

    def _reading(self, row: Row) -> Reading:
        if not row.pid:
            return Reading(row, None, None, Load())
        address = self._metrics.get(row.name)
        samples = scrape(self._client, address) if address else None
        return Reading(row, procfs.pss_bytes(row.pid), self._cpu_share(row.pid), load(samples, row.kind))

    def _cpu_share(self, pid: int) -> float | None:
        now, used = self._clock.now(), procfs.cpu_seconds(pid)
        before, used_before = self._cpu.get(pid, (now, used))
        self._cpu[pid] = (now, used)
        return (used - used_before) / (now - before) if now > before else None


def wide_enough(console: Console) -> Console:
    """This console on a terminal; elsewhere one that cuts and wraps nothing."""
    return console if console.is_terminal else Console(width=_WIDE)


def load(samples: Samples | None, kind: str) -> Load:
    """What a process's metrics say of its work."""
    if samples is None:
        return Load()
    if kind == "router":
        running = samples.total("triptych_requests_running")
        return Load(int(running), int(samples.total("triptych_requests_queued")))
    used, total = samples.value("triptych_kv_blocks", state="used"), samples.total("triptych_kv_blocks")
    share = used / total if total else None
    return Load(int(samples.total("triptych_running")), int(samples.total("triptych_waiting")), share)


def as_data(reading: Reading) -> dict[str, object]:
    """A reading for other programs; what is not known is None."""
    row, work = reading.row, reading.load
    return {
        "name": row.name,
        "kind": row.kind,
        "state": row.state,
        "pid": row.pid or None,
        "exit_code": row.exit_code,
        "uptime_s": round(row.uptime_s, 1) if row.pid else None,
        "restarts": row.restarts,
        "memory_bytes": reading.memory_bytes,
        "cpu": None if reading.cpu is None else round(reading.cpu, 3),
        "running": work.running,
        "waiting": work.waiting,
        "kv_used": None if work.kv_used is None else round(work.kv_used, 4),
    }


def _cells(reading: Reading) -> list[str | Text]:
    row, work = reading.row, reading.load
    state = row.state if row.exit_code is None else f"{row.state} ({row.exit_code})"
    return [
        row.name,
        Text(state, _STYLES.get(row.state, "")),
        str(row.pid or "-"),
        duration(row.uptime_s) if row.pid else "-",
        str(row.restarts + (row.state != "running")),
        _number(reading.memory_bytes, 2**-20),
        _number(reading.cpu, 100),
        _number(work.running),
        _number(work.waiting),
        _number(work.kv_used, 100, digits=1),
    ]


def _number(value: float | None, factor: float = 1, digits: int = 0) -> str:
    return "-" if value is None else f"{value * factor:,.{digits}f}"


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
