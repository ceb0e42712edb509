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
    assert main(["up", "--state-dir", str(tmp_path), "--topology", "q=1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("triptych up: ") and "Traceback" not in error


def test_nothing_up_is_said_plainly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--state-dir", str(tmp_path)]) == 1
    assert main(["down", "--state-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == ["nothing is up", "nothing is up"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["up", "serve", "demo", "status", "down", "logs", "chat", "doctor"])
def test_a_state_directory_that_is_a_file_is_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for place in (file, file / "below"):
        assert main([command, "--state-dir", str(place)]) == 2
        assert capsys.readouterr().err == (
            f"triptych {command}: cannot use the state directory {place}: Not a directory\n"
        )


@pytest.mark.parametrize("command", ["up", "serve"])
def test_a_state_directory_that_cannot_be_made_is_one_line(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--state-dir", "/proc/triptych"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "/proc/triptych" in error


@pytest.mark.parametrize("command", ["status", "down", "logs", "doctor"])
def test_a_command_that_only_reads_makes_no_state_directory(command: str, tmp_path: Path) -> None:
    main([command, "--state-dir", str(tmp_path / "none")])
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["up", "--ready-timeout", "-1"],
        ["up", "--ready-timeout", "nan"],
        ["down", "--timeout", "0"],
        ["logs", "-n", "-1"],
        ["up", "--http-port", "0"],
        ["up", "--http-port", "http"],
    ],
)
def test_an_option_out_of_range_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert f"argument {words[1]}" in capsys.readouterr().err.replace("argument -n/--lines", "argument -n")


def test_doctor_runs_on_the_standard_library_alone(tmp_path: Path, repo_root: Path) -> None:
    """Before anything is installed: -S leaves out what is."""
    command = [sys.executable, "-S", "-m", "services.cli", "doctor", "--state-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=repo_root)
    assert done.returncode == 1 and done.stderr == ""
    for missing in ("FAIL torch", "FAIL router packages", "FAIL worker packages", "make setup"):
        assert missing in done.stdout
