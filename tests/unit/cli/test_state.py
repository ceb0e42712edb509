"""A held lock means a launcher; records survive a round trip; garbage is no record."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from services.cli import procfs
from services.cli.state import AlreadyUp, Deployed, ProcessRecord, StateDir
from shared.errors import ConfigError


def test_one_launcher_at_a_time(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    assert not state.is_held()
    with state.locked():
        assert StateDir(tmp_path).is_held()
        with pytest.raises(AlreadyUp, match="triptych down"), StateDir(tmp_path).locked():
            pytest.fail("two launchers held one directory")
    assert not state.is_held()


def test_records_read_back(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.prepare()
    deployed = Deployed(
        1, "m", "http://127.0.0.1:8000", "127.0.0.1:8001", {"router": "127.0.0.1:8002"}, True, ("n",)
    )
    state.write_deployed(deployed)
    record = ProcessRecord("decode-0", "decode", 7, 8, 2)
    state.write_process(record)
    assert state.deployed() == deployed and state.processes() == [record]
    state.forget()
    assert state.deployed() is None and state.processes() == []


def test_unreadable_records_are_none(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.prepare()
    (tmp_path / "run.json").write_text("{")
    (state.pids / "x.pid").write_text('{"name": 1}')
    assert state.deployed() is None and state.processes() == []


def test_a_process_is_its_pid_and_its_start(tmp_path: Path) -> None:
    started = procfs.start_ticks(os.getpid())
    assert started is not None
    assert ProcessRecord("me", "decode", os.getpid(), started).alive
    assert not ProcessRecord("me", "decode", os.getpid(), started - 1).alive
    assert not ProcessRecord("gone", "decode", 2**22 + 1, started).alive


def test_records_of_another_shape_are_none(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.prepare()
    for text in ("[]", "null", '{"name": "x", "kind": "decode", "pid": "7", "started": 8}'):
        (state.pids / "x.pid").write_text(text)
        assert state.processes() == []


def test_what_cannot_be_written_is_said_when_it_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = StateDir(tmp_path)
    state.prepare()
    monkeypatch.setattr(os, "access", lambda path, mode: path != state.logs)
    with pytest.raises(ConfigError, match=f"{state.logs} is not writable"):
        state.prepare()


def test_other_commands_are_named_for_this_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = StateDir(Path(".triptych")), StateDir(tmp_path / "a b")
    monkeypatch.setattr(sys, "argv", ["bin/triptych"])
    assert here.command("down") == "triptych down"
    assert there.command("down") == f"triptych down --state-dir '{there.root}'"
    monkeypatch.setattr(sys, "argv", ["somewhere/services/cli/__main__.py"])
    assert here.command("down") == "make down"
    assert there.command("down").startswith("make down ARGS=") and "a b" in there.command("down")
