"""Logs: the end of each, chosen by name, followed through appends and replacement."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli.__main__ import main
from services.cli.logs import Follower, chosen


def test_names_choose_by_their_beginning() -> None:
    paths = [Path("decode-0.log"), Path("decode-1.log"), Path("router.log")]
    assert chosen(paths, ["decode"]) == paths[:2]
    assert chosen(paths, ["router", "decode-1"]) == paths[1:]
    assert chosen(paths, []) == paths


def test_a_follower_yields_whole_new_lines_only(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("old\n")
    follower = Follower(log)
    assert list(follower.new_lines()) == []
    with log.open("a") as file:
        file.write("one\ntw")
    assert list(follower.new_lines()) == ["one"]
    with log.open("a") as file:
        file.write("o\n")
    assert list(follower.new_lines()) == ["two"]


def test_a_follower_starts_over_when_the_file_is_replaced(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("a long old line\n")
    follower = Follower(log)
    log.rename(tmp_path / "x.log.1")
    assert list(follower.new_lines()) == []
    log.write_text("new\n")
    assert list(follower.new_lines()) == ["new"]


def test_the_command_shows_the_last_lines_with_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "router.log").write_text("a\nb\n")
    (tmp_path / "logs" / "decode-0.log").write_text("c\n")
    assert main(["logs", "--state-dir", str(tmp_path), "-n", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == ["decode-0 | c", "router   | b"]
    assert main(["logs", "--state-dir", str(tmp_path), "-n", "0"]) == 0
    assert capsys.readouterr().out == ""


def test_a_name_without_logs_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "router.log").write_text("a\n")
    assert main(["logs", "--state-dir", str(tmp_path), "router", "nosuch"]) == 1
    said = capsys.readouterr()
    assert "no logs of nosuch (but router)" in said.err and not said.out


def test_no_logs_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "--state-dir", str(tmp_path)]) == 1
    assert "no logs" in capsys.readouterr().err
