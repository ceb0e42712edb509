"""`triptych status`: the table of processes, once. Exits 1 when nothing is up."""

from __future__ import annotations

import argparse
import threading

from rich.console import Console

from services.cli import table
from services.cli.launch import add_state_option, state_of

#: Between the two looks that a CPU rate needs.
SAMPLE_S = 0.3


def configure(parser: argparse.ArgumentParser) -> None:
    add_state_option(parser)


def run(args: argparse.Namespace) -> int:
    state = state_of(args)
    record = state.deployed()
    if record is None or not state.is_held():
        print("nothing is up" if record is None else "the launcher is gone; clean up with: triptych down")
        return 1
    view = table.TableView(record.metrics)
    rows = table.rows_from_records(state.processes())
    view.render("", rows)
    threading.Event().wait(SAMPLE_S)
    Console().print(view.render(table.title(record), rows))
    view.close()
    return 0
