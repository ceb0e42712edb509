"""A launcher whose state directory is taken away notices, starts nothing any more, and can be found."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli.__main__ import main
from services.cli.leftovers import stop_lost_launchers
from services.cli.state import ProcessRecord, StateDir
from services.cli.supervisor import Backoff, StopTimes, Supervisor
from tests.unit.cli.helpers import eventually, script

FOREVER = "import signal; print('up', flush=True); signal.pause()"
NOW = Backoff(first_s=0.0, longest_s=0.0)
#: Holds a state directory as its launcher does, until it is told to stop.
LAUNCHER = """
import signal, sys
from pathlib import Path
from services.cli.state import StateDir
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
with StateDir(Path(sys.argv[1])).locked():
    print("held", flush=True)
    while True: signal.pause()
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A launcher of ``tmp_path/state``, which ignores that it is lost."""
    argv = [sys.executable, "-c", LAUNCHER, str(tmp_path / "state")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_directory_is_lost_when_it_is_removed_or_replaced(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    assert not state.is_lost(), "what nobody holds cannot be lost"
    with state.locked():
        assert not state.is_lost()
        shutil.rmtree(state.root)
        assert state.is_lost()
        with StateDir(state.root).locked():
            assert state.is_lost()
    assert not state.is_lost()


def test_a_supervisor_without_its_directory_starts_nothing_and_leaves_the_new_one_alone(
    tmp_path: Path,
) -> None:
    state, lost = StateDir(tmp_path / "state"), []
    with state.locked():
        supervisor = Supervisor(
            [script("decode-0", FOREVER)], state, backoff=NOW, lost=lambda: lost.append(1)
        )
        supervisor.start()
        supervisor.guard()
        shutil.rmtree(state.root)
        other = StateDir(state.root)
        other.prepare()
        record = ProcessRecord("decode-0", "decode", os.getpid(), 1)
        other.write_process(record)
        eventually(lambda: bool(lost))
        assert supervisor.failure is not None and "removed or replaced" in supervisor.failure.message
        row = supervisor.rows()[0]
        os.kill(row.pid, signal.SIGKILL)
        supervisor.check()
        supervisor.check()
        assert supervisor.rows()[0].restarts == 0
        supervisor.stop(StopTimes(5.0, 5.0))
    assert other.processes() == [record], "the records of another launcher are not ours to forget"
    assert not list(other.configs.iterdir())


def test_a_process_is_started_again_from_the_configuration_that_is_ours(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.prepare()
    source = "import signal, sys; print(open(sys.argv[1]).read(), flush=True); signal.pause()"
    supervisor = Supervisor([script("decode-0", source)], state, backoff=NOW)
    supervisor.start()
    try:
        supervisor.guard()
        ours = state.config_file("decode-0").read_text()
        state.config_file("decode-0").write_text("worker_id: somebody-else\n")
        os.kill(supervisor.rows()[0].pid, signal.SIGKILL)
        eventually(lambda: supervisor.rows()[0].restarts == 1)
        assert state.config_file("decode-0").read_text() == ours
    finally:
        supervisor.stop(StopTimes(5.0, 5.0))


def test_a_launcher_is_found_and_stopped_though_its_directory_is_gone(
    tmp_path: Path, launcher: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    state = StateDir(tmp_path / "state")
    assert state.lost_launchers() == [], "it holds what is there"
    shutil.rmtree(state.root)
    assert state.lost_launchers() == [launcher.pid]
    assert main(["down", "--state-dir", str(state.root)]) == 0
    assert launcher.wait() == 0
    assert "whose state directory had been removed" in capsys.readouterr().out
    assert not state.root.exists(), "down makes no directory"


def test_the_next_launcher_stops_the_lost_one_and_not_itself(
    tmp_path: Path, launcher: subprocess.Popen[str]
) -> None:
    state = StateDir(tmp_path / "state")
    shutil.rmtree(state.root)
    with state.locked():
        assert stop_lost_launchers(state) == [launcher.pid]
        assert launcher.wait() == 0
        assert state.lost_launchers() == []
