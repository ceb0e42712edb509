"""Starts processes, notices their deaths, starts them again, and stops them in order.

Owns child processes and nothing else: what they are is in ``topology``, whether they are ready in
``deployment``. One thread watches; the public methods may be called from any thread.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.cli import procfs
from services.cli.state import ProcessRecord, StateDir
from services.cli.topology import ProcessSpec
from shared.clock import Clock, MonotonicClock
from shared.config.load import write
from shared.errors import InternalError

WATCH_S = 0.05
#: A process that lived this long starts its backoff anew.
STABLE_S = 30.0
TAIL_LINES = 20

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backoff:
    """How long to wait before the n-th restart in a row, in seconds."""

    first_s: float = 0.2
    factor: float = 2.0
    longest_s: float = 10.0

    def delay(self, failures: int) -> float:
        """``failures`` counts from 1."""
        return float(min(self.longest_s, self.first_s * self.factor ** max(0, failures - 1)))


@dataclass(frozen=True)
class StopTimes:
    """How long the router may finish what runs, then how long each process has to exit, in seconds."""

    drain_s: float = 12.0
    exit_s: float = 5.0


class StartFailed(InternalError):
    """A process ended before the deployment was ready; the message holds the end of its log."""

    code = "start_failed"


@dataclass(frozen=True)
class Row:
    """One process as of now. ``state`` is "running", "restarting" or "exited"."""

    name: str
    kind: str
    state: str
    pid: int
    restarts: int
    uptime_s: float
    exit_code: int | None


class _Child:
    """Bookkeeping of one specification and its present process."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.process: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0
        self.restarts = -1
        self.failures = 0
        self.due_at: float | None = None
        self.exit_code: int | None = None
        self.recorded = True

    @property
    def state(self) -> str:
        if self.process is not None:
            return "running"
        return "exited" if self.due_at is None else "restarting"


class Supervisor:
    """Keeps one process running for every specification.

    Until ``guard()`` a death is final and ``failure`` tells of it; afterwards it leads to a restart
    (unless ``restart`` is off). Once the state directory is lost nothing is started any more.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        state: StateDir,
        *,
        restart: bool = True,
        clock: Clock | None = None,
        backoff: Backoff | None = None,
        environ: Mapping[str, str] | None = None,
        lost: Callable[[], object] = lambda: None,
    ) -> None:
        """``lost`` is called, perhaps more than once, when the state directory was taken from under us."""
        self._children = [_Child(spec) for spec in specs]
        self._state = state
        self._restart = restart
        self._clock = clock or MonotonicClock()
        self._backoff = backoff or Backoff()
        self._lost = lost
        self._environ = dict(os.environ if environ is None else environ)
        self._lock = threading.Lock()
        self._guarding = False
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        self.failure: InternalError | None = None

    def start(self) -> None:
        """Write every configuration file, start every process, and begin to watch. Raises ConfigError when
        the state directory takes no files."""
        try:
            for child in self._children:
                write(child.spec.config, self._state.config_file(child.spec.name))
                _rotate(self._state.log_file(child.spec.name))
            with self._lock:
                for child in self._children:
                    self._spawn(child)
                    if not child.recorded:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._state.unusable(error) from None
        self._watcher.start()

    def guard(self) -> None:
        """From now on restart what dies."""
        with self._lock:
            self._guarding = True

    def rows(self) -> list[Row]:
        """A snapshot of all processes, in the order of the specifications."""
        now = self._clock.now()
        with self._lock:
            return [_row(child, now) for child in self._children]

    def stop(
        self, times: StopTimes | None = None, progress: Callable[[str], None] = lambda text: None
    ) -> None:
        """Drain the router, then end the workers, then kill what is left. Safe to call twice."""
        times = times or StopTimes()
        self._closing.set()
        if self._watcher.is_alive():
            self._watcher.join()
        alive = [child for child in self._children if child.process is not None]
        routers = [child for child in alive if child.spec.kind == "router"]
        workers = [child for child in alive if child.spec.kind != "router"]
        self._say(progress, "draining")
        self._end(routers, times.drain_s)
        self._say(progress, "stopping")
        self._end(workers, times.exit_s)
        if not self._state.is_lost():
            with contextlib.suppress(OSError):
                self._state.forget()

    # --- inside

    @staticmethod
    def _say(progress: Callable[[str], None], text: str) -> None:
        """Whoever listens may write to a disk that is full: nothing may be left running because of it."""
        with contextlib.suppress(OSError):
            progress(text)

    def _spawn(self, child: _Child) -> None:
        """Start the child's process, from the configuration that is ours whatever lies there by now; the
        caller holds the lock. Raises OSError."""
        spec = child.spec
        write(spec.config, self._state.config_file(spec.name))
        with self._state.log_file(spec.name).open("ab") as output:
            process = subprocess.Popen(
                spec.argv(self._state.config_file(spec.name)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=spec.environment(self._environ),
                start_new_session=True,  # Ctrl-C at the terminal is for the launcher alone
            )
        child.process, child.exit_code, child.due_at = process, None, None
        child.started_at = self._clock.now()
        child.restarts += 1
        self._record(child, process.pid)

    def _record(self, child: _Child, pid: int) -> None:
        """Note who runs; tried again by ``check`` as long as there is no room for it."""
        spec = child.spec
        record = ProcessRecord(spec.name, spec.kind, pid, procfs.start_ticks(pid) or 0, child.restarts)
        try:
            self._state.write_process(record)
        except OSError as error:
            if child.recorded:
                log.warning("cannot note the pid of %s (%s): %d", spec.name, error.strerror, pid)
            child.recorded = False
        else:
            child.recorded = True

    def _watch(self) -> None:
        while not self._closing.wait(WATCH_S):
            self.check()

    def check(self) -> None:
        """Notice deaths and carry out restarts that are due. The watching thread calls this."""
        now = self._clock.now()
        with self._lock:
            if self._state.is_lost():
                self.failure = self._state.lost()
                self._lost()
                return
            for child in self._children:
                if child.process is not None and (code := child.process.poll()) is not None:
                    self._buried(child, code, now)
                elif child.process is not None and not child.recorded:
                    self._record(child, child.process.pid)
                elif child.due_at is not None and now >= child.due_at:
                    self._restart_child(child, now)

    def _restart_child(self, child: _Child, now: float) -> None:
        try:
            self._spawn(child)
        except OSError as error:  # no memory for a process, no room for its log
            child.failures += 1
            child.due_at = now + self._backoff.delay(child.failures)
            log.warning("cannot start %s (%s); tried again", child.spec.name, error.strerror)

    def _buried(self, child: _Child, code: int, now: float) -> None:
        child.process, child.exit_code = None, code
        if not self._guarding:
            if self.failure is None:
                self.failure = StartFailed(
                    _obituary(child.spec.name, code, self._state.log_file(child.spec.name))
                )
            return
        if self._restart:
            child.failures = 1 if now - child.started_at >= STABLE_S else child.failures + 1
            child.due_at = now + self._backoff.delay(child.failures)

    def _end(self, children: Sequence[_Child], patience_s: float) -> None:
        """TERM to all, KILL to those still there after ``patience_s``; reaps them."""
        for child in children:
            if child.process is not None:
                child.process.send_signal(signal.SIGTERM)
        deadline = self._clock.now() + patience_s
        for child in children:
            process = child.process
            if process is None:
                continue
            try:
                process.wait(timeout=max(0.0, deadline - self._clock.now()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            child.process, child.exit_code = None, process.returncode


def tail(path: Path, lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a log."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64 * 1024))
        found = file.read().decode("utf-8", errors="replace").splitlines()
        return found[-lines:] if lines else []
    return []


def _rotate(log: Path) -> None:
    """Keep the previous deployment's log beside the new one."""
    if log.exists():
        log.replace(log.with_suffix(".log.1"))


def _row(child: _Child, now: float) -> Row:
    alive = child.process is not None
    return Row(
        name=child.spec.name,
        kind=child.spec.kind,
        state=child.state,
        pid=child.process.pid if child.process is not None else 0,
        restarts=max(0, child.restarts),
        uptime_s=now - child.started_at if alive else 0.0,
        exit_code=child.exit_code,
    )


def _obituary(name: str, code: int, log: Path) -> str:
    how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
    last = "\n".join(f"    {line}" for line in tail(log)) or "    (its log is empty)"
    return f"{name} ended while starting ({how}); the end of its log ({log}):\n{last}"
