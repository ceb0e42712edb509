"""Down ends what a launcher left, and leaves a launcher alone that it cannot name yet."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.cli.__main__ import main
from services.cli.state import ProcessRecord, StateDir


def test_a_launcher_that_is_only_starting_is_not_mistaken_for_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = StateDir(tmp_path)
    with state.locked():
        assert state.launcher_pid() == os.getpid(), "a damaged run.json is no reason not to find it"
        (tmp_path / "lock").write_text("")
        state.write_process(ProcessRecord("decode-0", "decode", 2**22 + 1, 7))
        assert main(["down", "--state-dir", str(tmp_path)]) == 1
        assert state.processes() != []
    assert "only just starting" in capsys.readouterr().err


def test_records_of_the_dead_are_cleaned_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = StateDir(tmp_path)
    state.prepare()
    state.write_process(ProcessRecord("decode-0", "decode", 2**22 + 1, 7))
    assert main(["down", "--state-dir", str(tmp_path)]) == 0
    assert state.processes() == [] and "nothing is up" in capsys.readouterr().out
