"""The whole command line around real processes: up, status, chat, a death, logs, down."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from services.cli import procfs
from services.cli.state import StateDir
from shared.clock import SystemEntropy
from tests.unit.cli.helpers import eventually

pytestmark = pytest.mark.e2e


def triptych(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.cli", *argv], capture_output=True, text=True, timeout=120
    )


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StateDir]:
    """The default six processes with the witness model, started detached."""
    state = StateDir(tmp_path_factory.mktemp("state"))
    ports = procfs.internal_ports("127.0.0.1", SystemEntropy())
    flags = ("--http-port", "--grpc-port", "--metrics-port")
    options = [word for flag in flags for word in (flag, str(next(ports)))]
    done = triptych("up", "--detach", "--model", "witness", "--state-dir", str(state.root), *options)
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        assert "is up" in done.stdout
        assert f"make down ARGS='--state-dir {state.root}'" in done.stdout
        yield state
    finally:
        triptych("down", "--state-dir", str(state.root))


def test_six_processes_run_under_a_launcher(up: StateDir) -> None:
    assert up.is_held()
    records = up.processes()
    assert len({record.pid for record in records if record.alive}) == 6


def test_status_lists_every_process(up: StateDir) -> None:
    done = triptych("status", "--state-dir", str(up.root))
    assert done.returncode == 0
    for record in up.processes():
        assert record.name in done.stdout


def test_chat_answers_through_http(up: StateDir) -> None:
    done = triptych("chat", "--state-dir", str(up.root), "--max-tokens", "5", "hello")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip("\n")


def test_a_killed_worker_is_started_again_and_serves(up: StateDir) -> None:
    def decode() -> tuple[int, int]:
        record = next(record for record in up.processes() if record.name == "decode-0")
        return record.pid, record.restarts

    pid, restarts = decode()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: decode()[0] != pid)
    assert decode()[1] == restarts + 1
    assert triptych("chat", "--state-dir", str(up.root), "--max-tokens", "5", "hello").returncode == 0


def test_logs_show_what_the_services_said(up: StateDir) -> None:
    done = triptych("logs", "--state-dir", str(up.root), "router")
    assert done.returncode == 0 and re.match(r"router +\| ", done.stdout)


def test_a_second_up_is_refused(up: StateDir) -> None:
    done = triptych("up", "--detach", "--model", "witness", "--state-dir", str(up.root))
    assert done.returncode == 1 and "already up" in done.stderr


def test_down_ends_every_process(up: StateDir) -> None:
    records = up.processes()
    done = triptych("down", "--state-dir", str(up.root))
    assert done.returncode == 0 and "stopped" in done.stdout
    assert not any(record.alive for record in records)
    assert not up.is_held()
