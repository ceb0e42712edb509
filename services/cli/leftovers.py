"""Ends what earlier launchers left behind: launchers that lost their state directory, processes without one.

Owns how they are found; a launcher ends its own processes by itself (``supervisor``).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Collection

from services.cli import procfs
from services.cli.state import ProcessRecord, StateDir
from shared.clock import Clock, MonotonicClock
from shared.errors import InternalError

POLL_S = 0.05


def stop_launcher(
    pid: int, state: StateDir, timeout_s: float, gone: Callable[[], bool] = lambda: True
) -> None:
    """Ask a launcher to stop everything that it started; returns when it has ended and ``gone`` holds.

    Raises InternalError when that takes longer than ``timeout_s``.
    """
    started = procfs.start_ticks(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)

    def ended() -> bool:
        return (started is None or procfs.start_ticks(pid) != started) and gone()

    if not _wait_for(ended, timeout_s, MonotonicClock()):
        raise InternalError(
            f"the launcher (pid {pid}) did not stop within {timeout_s:.0f} s; its logs: {state.logs}"
        )


def stop_lost_launchers(state: StateDir, timeout_s: float = 30.0) -> list[int]:
    """Stop launchers that once held this directory and run on though it was removed or replaced; returns
    their pids. They come before ``end_leftovers``: what they started, they would start again.

    Raises InternalError when one does not stop in time.
    """
    pids = state.lost_launchers()
    for pid in pids:
        stop_launcher(pid, state, timeout_s)
    return pids


def end_leftovers(state: StateDir, patience_s: float = 5.0, clock: Clock | None = None) -> list[str]:
    """End processes of a launcher that is gone; returns their names. Only for a state nobody holds."""
    found = [record for record in state.processes() if record.alive]
    found += _unnoted(state, {record.pid for record in found})
    for record in found:
        _signal(record, signal.SIGTERM)
    _wait_for(lambda: not any(record.alive for record in found), patience_s, clock or MonotonicClock())
    for record in found:
        if record.alive:
            _signal(record, signal.SIGKILL)
    state.forget()
    return [record.name for record in found]


def _unnoted(state: StateDir, noted: Collection[int]) -> list[ProcessRecord]:
    """Processes that run with a configuration of this state though nobody could note their pids."""
    found = []
    for pid in procfs.with_argument(f"{state.configs}{os.sep}"):
        started = procfs.start_ticks(pid)
        if started is not None and pid not in noted and pid != os.getpid():
            found.append(ProcessRecord(f"process {pid}", "", pid, started))
    return found


def _wait_for(condition: Callable[[], bool], timeout_s: float, clock: Clock) -> bool:
    """Whether the condition came to hold in time."""
    deadline, pause = clock.now() + timeout_s, threading.Event()
    while not condition():
        if clock.now() > deadline:
            return False
        pause.wait(POLL_S)
    return True


def _signal(record: ProcessRecord, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(record.pid, number)
