"""`triptych status`: the table of processes, once. Exits 1 unless a deployment is up under its launcher."""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Sequence

from rich.console import Console

from services.cli import table
from services.cli.state import Deployed, StateDir, add_state_option, state_of
from services.cli.supervisor import Row

#: Between the two looks that a CPU rate needs.
SAMPLE_S = 0.3


def configure(parser: argparse.ArgumentParser) -> None:
    add_state_option(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    state = state_of(args)
    held, record, processes = state.is_held(), state.deployed(), state.processes()
    rows = table.rows_from_records(processes)
    metrics = record.metrics if record is not None else {}
    remarks = _remarks(state, held, record, rows)
    view = table.TableView(metrics)
    try:
        if rows:
            view.read(rows)
            threading.Event().wait(SAMPLE_S)
        if args.json:
            print(json.dumps(_document(held, record, remarks, view.read(rows)), indent=2))
        elif rows:
            title = table.title(record) if record is not None else ""
            table.wide_enough(Console()).print(view.render(title, rows, remarks))
        else:
            print("\n".join(remarks))
    finally:
        view.close()
    return 0 if held and record is not None else 1


def _remarks(state: StateDir, held: bool, record: Deployed | None, rows: Sequence[Row]) -> list[str]:
    """What the table does not say: how the deployment as a whole stands, and what to do about it."""
    if held:
        starting = [] if record is not None and record.ready else ["starting"]
        return [*starting, *(record.notes if record is not None else ())]
    if record is None and not rows:
        return ["nothing is up"]
    alive = sum(1 for row in rows if row.pid)
    orphans = f"{alive} of its {len(rows)} processes go on without it, and without restarts"
    fate = orphans if alive else "none of its processes is left"
    return [f"the launcher is gone; {fate}; clean up with: {state.command('down')}"]


def _document(
    held: bool, record: Deployed | None, remarks: Sequence[str], readings: Sequence[table.Reading]
) -> dict[str, object]:
    return {
        "up": held and record is not None and record.ready,
        "launcher_pid": record.launcher_pid if held and record is not None else None,
        "model": record.model if record is not None else None,
        "http": record.http if record is not None else None,
        "grpc": record.grpc if record is not None else None,
        "remarks": list(remarks),
        "processes": [table.as_data(reading) for reading in readings],
    }
