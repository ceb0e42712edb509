"""A signal sets an event and decides the exit code; Ctrl-C during imports ends quietly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli.signals import quiet_interrupt, stop_on_signals

#: A command whose import is interrupted: as if Ctrl-C came in the first moment of the launcher.
INTERRUPTED_IMPORT = """
import importlib, os, signal
from services.cli import __main__
real = importlib.import_module
def import_module(name):
    os.kill(os.getpid(), signal.SIGINT)
    return real(name)
importlib.import_module = import_module
__main__.main(["status"])
"""


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """As on a terminal: what runs in the background may have been told to ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_the_first_signal_decides_the_exit_code(number: int, code: int) -> None:
    before = signal.getsignal(number)
    with stop_on_signals() as stopping:
        assert not stopping.is_set()
        os.kill(os.getpid(), number)
        assert stopping.wait(10)
        os.kill(os.getpid(), signal.SIGINT)
        assert stopping.exit_code == code
    assert signal.getsignal(number) is before


def test_interrupted_imports_say_nothing(repo_root: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED_IMPORT]
    done = subprocess.run(command, capture_output=True, text=True, cwd=repo_root)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_handlers_are_as_before_after_the_imports() -> None:
    before = signal.getsignal(signal.SIGINT)
    with quiet_interrupt():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_an_ignored_interrupt_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with quiet_interrupt():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_serve_ended_before_it_is_ready_says_by_which_signal(tmp_path: Path, repo_root: Path) -> None:
    """Workers that never announce themselves keep it waiting; the first line it prints is our cue."""
    source = (
        "import sys, services.cli.deployment as d\n"
        "d._missing = lambda *_: ['nothing that ever comes']\n"
        "from services.cli.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    words = ["serve", "--model", "witness", "--topology", "e=0,p=0,d=1,s=0", "--state-dir", str(tmp_path)]
    for flag, port in zip(("--http-port", "--grpc-port", "--metrics-port"), _ports(), strict=True):
        words += [flag, str(port)]
    command = [sys.executable, "-c", source, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=repo_root) as process:
        assert process.stdout is not None
        try:
            assert "nothing that ever comes" in process.stdout.readline()
            process.send_signal(signal.SIGTERM)
            process.stdout.read()
            assert process.wait(60) == 143
        finally:
            process.kill()


def _ports() -> list[int]:
    from services.cli.procfs import internal_ports
    from shared.clock import SystemEntropy

    ports = internal_ports("127.0.0.1", SystemEntropy())
    return [next(ports) for _ in range(3)]
