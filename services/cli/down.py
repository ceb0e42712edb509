"""`triptych down`: stop the launcher of a state directory, or what a killed launcher left behind."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import threading
from collections.abc import Callable

from services.cli import procfs
from services.cli.arguments import seconds
from services.cli.state import StateDir, add_state_option, state_of
from services.cli.supervisor import end_leftovers
from shared.clock import MonotonicClock
from shared.errors import InternalError


def configure(parser: argparse.ArgumentParser) -> None:
    add_state_option(parser)
    parser.add_argument("--timeout", type=seconds, default=30.0, metavar="SECONDS", help="default 30")


def run(args: argparse.Namespace) -> int:
    state = state_of(args)
    record = state.deployed()
    if state.is_held():
        pid = state.launcher_pid() if record is None else record.launcher_pid
        if pid is None:
            raise InternalError("a launcher is only just starting, or ending; try again in a moment")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        started = procfs.start_ticks(pid)
        _wait_until(lambda: not state.is_held() and procfs.start_ticks(pid) != started, state, args.timeout)
        print("stopped")
        return 0
    left = end_leftovers(state)
    print(f"the launcher was gone; ended {', '.join(left)}" if left else "nothing is up")
    return 0


def _wait_until(gone: Callable[[], bool], state: StateDir, timeout_s: float) -> None:
    clock = MonotonicClock()
    deadline, pause = clock.now() + timeout_s, threading.Event()
    while not gone():
        if clock.now() > deadline:
            raise InternalError(f"the launcher did not stop within {timeout_s:.0f} s; its logs: {state.logs}")
        pause.wait(0.05)
