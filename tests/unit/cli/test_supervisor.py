"""What dies is started again, what cannot start says why, and stopping leaves nothing behind."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.cli import procfs
from services.cli.leftovers import end_leftovers
from services.cli.state import ProcessRecord, StateDir
from services.cli.supervisor import Backoff, StopTimes, Supervisor, tail
from shared.errors import ConfigError
from tests.unit.cli.helpers import Script, eventually, script

FOREVER = "import signal; print('up', flush=True); signal.pause()"
STUBBORN = (
    "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('up', flush=True)\nwhile True: signal.pause()"
)
NOW = Backoff(first_s=0.0, longest_s=0.0)


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    state = StateDir(tmp_path)
    state.prepare()
    return state


@contextmanager
def running(
    state: StateDir, *specs: Script, restart: bool = True, backoff: Backoff = NOW
) -> Iterator[Supervisor]:
    supervisor = Supervisor(specs, state, restart=restart, backoff=backoff)
    supervisor.start()
    try:
        yield supervisor
    finally:
        supervisor.stop(StopTimes(drain_s=5.0, exit_s=5.0))


def _says_up(state: StateDir, name: str) -> bool:
    return "up" in tail(state.log_file(name))


def test_a_process_that_dies_is_started_again_under_a_new_pid(state: StateDir) -> None:
    with running(state, script("decode-0", FOREVER)) as supervisor:
        supervisor.guard()
        first = supervisor.rows()[0].pid
        os.kill(first, signal.SIGKILL)
        eventually(lambda: supervisor.rows()[0].restarts == 1)
        row = supervisor.rows()[0]
        assert row.state == "running" and row.pid not in {0, first}
        assert [(record.pid, record.restarts) for record in state.processes()] == [(row.pid, 1)]


def test_without_restart_the_dead_stay_dead(state: StateDir) -> None:
    with running(state, script("decode-0", FOREVER), restart=False) as supervisor:
        supervisor.guard()
        os.kill(supervisor.rows()[0].pid, signal.SIGKILL)
        eventually(lambda: supervisor.rows()[0].state == "exited")
        assert supervisor.rows()[0].exit_code == -signal.SIGKILL


def test_a_death_while_starting_is_a_failure_with_the_end_of_the_log(state: StateDir) -> None:
    dying = script("prefill-0", "print('no such model', flush=True); raise SystemExit(3)", kind="prefill")
    with running(state, dying, script("decode-0", FOREVER)) as supervisor:
        eventually(lambda: supervisor.failure is not None)
        message = str(supervisor.failure)
    assert "prefill-0" in message and "exit code 3" in message and "no such model" in message


def test_restarts_in_a_row_wait_longer_and_longer() -> None:
    backoff = Backoff(first_s=0.5, factor=2.0, longest_s=3.0)
    assert [backoff.delay(n) for n in (1, 2, 3, 4, 5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_a_restart_waits_for_its_backoff(state: StateDir) -> None:
    with running(
        state, script("decode-0", "pass"), backoff=Backoff(first_s=3600, longest_s=3600)
    ) as supervisor:
        supervisor.guard()
        eventually(lambda: supervisor.rows()[0].state != "running")
        supervisor.check()
        assert supervisor.rows()[0].restarts == 0


def test_stop_ends_everything_and_kills_what_will_not_go(state: StateDir) -> None:
    specs = (script("decode-0", STUBBORN), script("router", FOREVER, kind="router"))
    supervisor = Supervisor(specs, state)
    supervisor.start()
    eventually(lambda: all(_says_up(state, spec.name) for spec in specs))
    records = state.processes()
    supervisor.stop(StopTimes(drain_s=5.0, exit_s=0.1))
    assert len(records) == 2 and not any(record.alive for record in records)
    assert [row.exit_code for row in supervisor.rows()] == [-signal.SIGKILL, -signal.SIGTERM]
    assert state.processes() == []
    supervisor.stop()


def test_the_router_ends_before_the_workers(state: StateDir) -> None:
    order = state.root / "order"
    note = (
        "import signal, sys\n"
        "def end(*_):\n    open({path!r}, 'a').write({name!r}); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end); print('up', flush=True)\nwhile True: signal.pause()"
    )
    specs = [
        script(name, note.format(path=str(order), name=f"{name} "), kind=kind)
        for name, kind in (("decode-0", "decode"), ("router", "router"))
    ]
    with running(state, *specs):
        eventually(lambda: all(_says_up(state, spec.name) for spec in specs))
    assert order.read_text() == "router decode-0 "


def test_a_child_gets_its_configuration_and_its_thread_count(state: StateDir) -> None:
    source = "import os, sys; print(open(sys.argv[1]).read(), os.environ['OMP_WAIT_POLICY'], flush=True)"
    with running(state, script("decode-0", source)) as supervisor:
        eventually(lambda: supervisor.rows()[0].state == "exited")
    log = state.log_file("decode-0").read_text()
    assert "worker_id: kv-store-0" in log and "passive" in log


def test_leftovers_of_a_killed_launcher_are_ended(state: StateDir) -> None:
    supervisor = Supervisor([script("decode-0", FOREVER)], state)
    supervisor.start()
    records = state.processes()
    assert end_leftovers(StateDir(state.root)) == ["decode-0"]
    assert not records[0].alive and state.processes() == []
    supervisor.stop()


def test_a_recycled_pid_is_not_mistaken_for_a_leftover(state: StateDir) -> None:
    started = procfs.start_ticks(os.getpid())
    assert started is not None
    state.write_process(ProcessRecord("decode-0", "decode", os.getpid(), started + 1))
    assert end_leftovers(state) == []


def test_the_previous_log_is_kept_beside_the_new_one(state: StateDir) -> None:
    state.log_file("decode-0").write_text("old\n")
    with running(state, script("decode-0", FOREVER)):
        eventually(lambda: _says_up(state, "decode-0"))
    assert tail(state.log_file("decode-0")) == ["up"]
    assert tail(state.logs / "decode-0.log.1") == ["old"]


class FullDisk(StateDir):
    """A state directory on a disk that is full while ``full``; what is there can be read and appended to."""

    full = False

    def write_process(self, record: ProcessRecord) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write_process(record)


def test_a_full_disk_ends_neither_supervision_nor_what_runs(tmp_path: Path) -> None:
    state = FullDisk(tmp_path)
    state.prepare()
    with running(state, script("decode-0", FOREVER), script("prefill-0", FOREVER)) as supervisor:
        supervisor.guard()
        state.full = True
        os.kill(supervisor.rows()[0].pid, signal.SIGKILL)
        eventually(lambda: supervisor.rows()[0].restarts == 1)
        unnoted = supervisor.rows()[0].pid
        state.full = False
        eventually(lambda: unnoted in {record.pid for record in state.processes()})
        os.kill(supervisor.rows()[1].pid, signal.SIGKILL)
        eventually(lambda: supervisor.rows()[1].restarts == 1)


def test_a_full_disk_at_the_start_leaves_nobody_behind(tmp_path: Path) -> None:
    state = FullDisk(tmp_path)
    state.prepare()
    state.full = True
    supervisor = Supervisor([script("decode-0", FOREVER)], state)
    with pytest.raises(ConfigError, match="No space left"):
        supervisor.start()
    pid = supervisor.rows()[0].pid
    assert pid

    def fails(text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    supervisor.stop(StopTimes(drain_s=5.0, exit_s=5.0), fails)
    assert procfs.start_ticks(pid) is None


def test_a_leftover_whose_pid_could_not_be_noted_is_found_all_the_same(tmp_path: Path) -> None:
    state = FullDisk(tmp_path)
    state.prepare()
    with running(state, script("decode-0", FOREVER)) as supervisor:
        pid = supervisor.rows()[0].pid
        (record,) = state.processes()
        (state.pids / "decode-0.pid").unlink()
        assert end_leftovers(state) == [f"process {pid}"]
        eventually(lambda: procfs.start_ticks(pid) != record.started)
