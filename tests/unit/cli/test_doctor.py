"""Findings are right about what is given to them, and each failure says what to do."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli import doctor
from services.cli.__main__ import main
from services.cli.state import StateDir


@pytest.mark.parametrize(
    ("version", "level"), [((3, 10, 1), "fail"), ((3, 11, 0), "ok"), ((3, 13, 2), "ok"), ((3, 14, 0), "fail")]
)
def test_python(version: tuple[int, int, int], level: str) -> None:
    assert doctor.check_python(version).level == level


@pytest.mark.parametrize(
    ("version", "level"),
    [("", "fail"), ("2.9.1", "fail"), ("2.11.0", "ok"), ("2.13.0+cpu", "ok"), ("3.0", "ok")],
)
def test_torch(version: str, level: str) -> None:
    finding = doctor.check_torch(lambda name: version)
    assert finding.level == level and (level == "ok" or finding.advice)


def test_a_tool_that_is_not_there_is_a_warning_with_advice() -> None:
    finding = doctor.check_tool("no-such-tool", "for nothing")
    assert finding.level == "warn" and "no-such-tool" in finding.advice


def test_memory_and_disk_have_thresholds() -> None:
    assert doctor.check_memory(doctor.MEMORY_BYTES).level == "ok"
    assert doctor.check_memory(doctor.MEMORY_BYTES - 1).level == "warn"
    assert doctor.check_disk(doctor.DISK_BYTES).level == "ok"
    assert doctor.check_disk(doctor.DISK_BYTES - 1).level == "fail"


def test_disk_is_asked_for_where_the_directory_would_be(tmp_path: Path) -> None:
    assert doctor.free_bytes(tmp_path / "not" / "yet") == doctor.free_bytes(tmp_path) > 0


def test_a_state_directory_that_cannot_be_written_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = StateDir(tmp_path / "there" / "state")
    assert doctor.check_state(state).level == "ok" and not state.root.exists()
    state.prepare()
    for closed in (state.root, state.logs):
        monkeypatch.setattr("os.access", lambda path, mode, closed=closed: path != closed)
        assert doctor.check_state(state).level == "fail"


def test_shared_memory_works_here() -> None:
    assert doctor.check_shared_memory().level == "ok"


def test_a_taken_port_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port))
        server.listen()
        monkeypatch.setattr(doctor, "PublicPorts", lambda: doctor_ports(free_port))
        findings = list(doctor.check_ports(StateDir(tmp_path)))
    assert [f.level for f in findings if str(free_port) in f.subject] == ["warn"]


def doctor_ports(port: int) -> object:
    from services.cli.topology import PublicPorts

    return PublicPorts(http=port, grpc=port + 1, metrics=port + 2)


def test_the_command_reports_every_subject(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--state-dir", str(tmp_path)])
    report = capsys.readouterr().out
    for subject in ("Python", "torch", "gcc", "shared memory", "memory", "disk", "port 8000", "demo model"):
        assert subject in report


def test_make_doctor_needs_no_setting_up(tmp_path: Path, repo_root: Path) -> None:
    """Without an environment it takes the system's Python, and installs nothing."""
    none = tmp_path / "none"
    command = ["make", "doctor", f"VENV={none}", f"PYTHON={sys.executable}", f"ARGS=--state-dir {tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=repo_root)
    assert "ok   Python" in done.stdout and "setup:" not in done.stdout + done.stderr
    assert not none.exists()
