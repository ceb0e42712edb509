"""The command line itself: every command answers --help, errors are one line and an exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.__main__ import COMMANDS, main


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert COMMANDS[command][1].split()[0] in capsys.readouterr().out


def test_help_needs_no_heavy_import() -> None:
    """The launcher must not carry torch, nor pay for what it does not use."""
    source = (
        "import sys; from services.cli.__main__ import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'grpc', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_no_command_imports_torch() -> None:
    modules = ", ".join(module for module, _ in COMMANDS.values())
    source = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_bad_option_value_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--state-dir", str(tmp_path), "--topology", "q=1"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("triptych up: ") and "Traceback" not in error


def test_nothing_up_is_said_plainly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--state-dir", str(tmp_path)]) == 1
    assert main(["down", "--state-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == ["nothing is up", "nothing is up"]
