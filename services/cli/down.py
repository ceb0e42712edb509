"""`triptych down`: stop the launcher of a state directory, or what a killed launcher left behind."""

from __future__ import annotations

import argparse

from services.cli.arguments import seconds
from services.cli.leftovers import end_leftovers, stop_launcher, stop_lost_launchers
from services.cli.state import add_state_option, state_of
from shared.errors import InternalError


def configure(parser: argparse.ArgumentParser) -> None:
    add_state_option(parser)
    parser.add_argument("--timeout", type=seconds, default=30.0, metavar="SECONDS", help="default 30")


def run(args: argparse.Namespace) -> int:
    state = state_of(args)
    lost = stop_lost_launchers(state, args.timeout)
    record = state.deployed()
    if state.is_held():
        pid = state.launcher_pid() if record is None else record.launcher_pid
        if pid is None:
            raise InternalError("a launcher is only just starting, or ending; try again in a moment")
        stop_launcher(pid, state, args.timeout, lambda: not state.is_held())
        print("stopped")
        return 0
    left = end_leftovers(state)
    if lost:
        print("stopped a launcher whose state directory had been removed")
    elif left:
        print(f"the launcher was gone; ended {', '.join(left)}")
    else:
        print("nothing is up")
    return 0
