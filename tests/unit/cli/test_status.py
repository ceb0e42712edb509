"""Status tells what is known of the processes, whoever still watches over them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from services.cli import procfs, status
from services.cli.__main__ import main
from services.cli.state import Deployed, ProcessRecord, StateDir

NOTE = "kv.num_blocks=5 holds 64 tokens: served context 64 instead of 2048 (decode-0)"


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "SAMPLE_S", 0.0)


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    """One living process and one dead one, of a deployment that was ready."""
    state = StateDir(tmp_path)
    state.prepare()
    started = procfs.start_ticks(os.getpid()) or 0
    state.write_process(ProcessRecord("decode-0", "decode", os.getpid(), started))
    state.write_process(ProcessRecord("decode-1", "decode", os.getpid(), started + 1, 3))
    write(state, ready=True)
    return state


def write(state: StateDir, ready: bool, notes: tuple[str, ...] = (NOTE,)) -> None:
    state.write_deployed(Deployed(os.getpid(), "m", "http://127.0.0.1:1", "127.0.0.1:2", {}, ready, notes))


def test_a_deployment_is_shown_with_what_is_to_be_known_of_it(
    state: StateDir, capsys: pytest.CaptureFixture[str]
) -> None:
    with state.locked():
        assert main(["status", "--state-dir", str(state.root)]) == 0
    out = capsys.readouterr().out
    assert "http://127.0.0.1:1/v1" in out and NOTE in out and "decode-0" in out and "gone" not in out


def test_nothing_is_cut_where_there_is_no_terminal(
    state: StateDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """COLUMNS is what a narrow terminal leaves in the environment of a pipe."""
    monkeypatch.setenv("COLUMNS", "40")
    write(state, ready=True, notes=("a note " * 20,))
    with state.locked():
        main(["status", "--state-dir", str(state.root)])
    out = capsys.readouterr().out
    assert ("a note " * 20).strip() in out and str(os.getpid()) in out
    assert "\u2026" not in out and "\x1b" not in out


def test_processes_without_their_launcher_are_shown_with_what_to_do(
    state: StateDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--state-dir", str(state.root)]) == 1
    out = capsys.readouterr().out
    assert "the launcher is gone; 1 of its 2 processes go on" in out
    assert f"triptych down --state-dir {state.root}" in out
    assert "decode-0" in out and "running" in out and "exited" in out and str(os.getpid()) in out


def test_a_deployment_that_is_not_ready_is_starting(
    state: StateDir, capsys: pytest.CaptureFixture[str]
) -> None:
    write(state, ready=False)
    with state.locked():
        main(["status", "--state-dir", str(state.root)])
    assert "starting" in capsys.readouterr().out.splitlines()


def test_json_is_for_other_programs(state: StateDir, capsys: pytest.CaptureFixture[str]) -> None:
    with state.locked():
        assert main(["status", "--json", "--state-dir", str(state.root)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["up"] is True and found["http"] == "http://127.0.0.1:1" and found["remarks"] == [NOTE]
    alive, dead = found["processes"]
    assert (alive["name"], alive["state"], alive["pid"]) == ("decode-0", "running", os.getpid())
    assert alive["memory_bytes"] > 0 and alive["running"] is None
    assert (dead["state"], dead["pid"], dead["restarts"]) == ("exited", None, 3)


def test_json_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--json", "--state-dir", str(tmp_path)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["up"] is False and found["processes"] == [] and found["remarks"] == ["nothing is up"]
