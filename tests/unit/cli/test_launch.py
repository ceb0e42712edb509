"""The options of a deployment fit the model, and the line of progress leaves what must stay."""

from __future__ import annotations

import argparse
import io
import json
import socket
from pathlib import Path

import pytest
from rich.console import Console

from services.cli.launch import ProgressLine, add_launch_options, launch_options
from services.cli.state import StateDir
from services.cli.topology import Topology
from shared.errors import ConfigError
from tests.unit.cli.test_preflight import LLAMA


def topology_of(tmp_path: Path, *words: str) -> Topology:
    parser = argparse.ArgumentParser()
    add_launch_options(parser)
    return launch_options(parser.parse_args(words), StateDir(tmp_path), lambda text: None)[0]


def test_a_text_model_gets_no_encoder_unless_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    model = ("--model", str(tmp_path))
    assert topology_of(tmp_path, *model) == Topology(encoders=0)
    assert topology_of(tmp_path, *model, "--topology", "d=1") == Topology(encoders=0, decodes=1)
    assert topology_of(tmp_path, *model, "--topology", "e=1").encoders == 1
    assert topology_of(tmp_path, "--model", "witness") == Topology()


def test_a_bad_topology_is_said_before_a_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.cli.launch.resolve_model", lambda *_: pytest.fail("it was built"))
    with pytest.raises(ConfigError, match="topology"):
        topology_of(tmp_path, "--topology", "q=1")


def test_a_taken_port_is_said_before_a_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.cli.launch.resolve_model", lambda *_: pytest.fail("it was built"))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        with pytest.raises(ConfigError, match=f"in use by another program: --http-port {port}"):
            topology_of(tmp_path, "--http-port", port)


def test_a_warning_stays_above_the_line_that_changes() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, record=True)
    line = ProgressLine(console)
    line("waiting")
    line.keep("warning: [less] than asked for")
    line.pause()
    assert "warning: [less] than asked for\n" in console.export_text()
