"""`triptych up`: start every process, then show a live table until told to stop; or `--detach`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading

from rich.console import Console
from rich.live import Live

from services.cli.deployment import Deployment, Progress, checked_plan, deployed
from services.cli.launch import ProgressLine, add_launch_options, launch_options, prepared_state
from services.cli.signals import Interrupted, stop_on_signals
from services.cli.state import StateDir
from services.cli.supervisor import tail
from services.cli.table import TableView, wide_enough
from services.cli.topology import LaunchOptions, Topology
from shared.errors import ConfigError, InternalError

REFRESH_S = 1.0
LAUNCHER = "launcher"
#: How a command ends whose configuration cannot work.
UNWORKABLE = 2


class DetachFailed(InternalError):
    """The detached launcher ended before everything was ready."""

    code = "detach_failed"


def configure(parser: argparse.ArgumentParser) -> None:
    add_launch_options(parser)
    parser.add_argument(
        "--detach", action="store_true", help="return when everything is ready, and keep serving"
    )


def run(args: argparse.Namespace) -> int:
    """0 when a signal ended what was ready; 128 + its number when it was not ready yet."""
    console = wide_enough(Console())
    state = prepared_state(args)
    line = ProgressLine(console)
    try:
        if state.is_held():
            raise state.already_up()
        topology, options = launch_options(args, state, line)
        with stop_on_signals() as stopping:
            try:
                if args.detach:
                    checked_plan(topology, options)
                    _detach(args, state, line, stopping)
                    line.pause()
                    _announce(console, state)
                else:
                    _stay(args, state, (topology, options), line, console, stopping)
            except Interrupted:
                return stopping.exit_code
    finally:
        line.pause()
    return 0


def _stay(
    args: argparse.Namespace,
    state: StateDir,
    wanted: tuple[Topology, LaunchOptions],
    line: ProgressLine,
    console: Console,
    stopping: threading.Event,
) -> None:
    with deployed(
        state,
        *wanted,
        restart=not args.no_restart,
        ready_timeout_s=args.ready_timeout,
        progress=line,
        warn=line.keep,
        stopping=stopping,
    ) as deployment:
        line.pause()
        show_table(deployment, console, stopping)


def show_table(deployment: Deployment, console: Console, stopping: threading.Event) -> None:
    """Redraw until ``stopping``; without a terminal, print once and wait."""
    view = TableView({spec.name: spec.metrics_address for spec in deployment.specs})
    addresses = f"OpenAI {deployment.http_url}/v1   gRPC {deployment.grpc_address}"
    title = f"{deployment.model}   {addresses}   Ctrl-C stops"
    try:
        if not console.is_terminal:
            console.print(view.render(title, deployment.supervisor.rows(), deployment.notes))
            stopping.wait()
            return
        with Live(console=console, auto_refresh=False) as live:
            while not stopping.is_set():
                table = view.render(title, deployment.supervisor.rows(), deployment.notes)
                live.update(table, refresh=True)
                stopping.wait(REFRESH_S)
    finally:
        view.close()


def _detach(args: argparse.Namespace, state: StateDir, progress: Progress, stopping: threading.Event) -> None:
    """Start `triptych serve` with the same options in a session of its own; return when it is ready."""
    log = state.log_file(LAUNCHER)
    with log.open("wb") as file:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "serve", *_serve_arguments(args)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    said = ""
    while launcher.poll() is None:
        record = state.deployed()
        if record is not None and record.ready and record.launcher_pid == launcher.pid:
            return
        last = (tail(log, 1) or [""])[0]
        if last and last != said and not last.startswith((" ", "warning:")):
            progress(said := last)
        if stopping.wait(0.1):
            launcher.terminate()
            launcher.wait()
            raise Interrupted("stopped while starting")
    kind = ConfigError if launcher.returncode == UNWORKABLE else DetachFailed
    said_last = tail(log, 40) or [_without_words(state)]
    raise kind("could not start:\n" + "\n".join(said_last))


def _without_words(state: StateDir) -> str:
    """Why a launcher may have left nothing in its log."""
    try:
        disk = os.statvfs(state.logs)
    except OSError:
        return f"the state directory {state.root} was removed meanwhile"
    free = disk.f_bavail * disk.f_frsize
    return f"its log {state.log_file(LAUNCHER)} is empty; {free} bytes are free there"


def _serve_arguments(args: argparse.Namespace) -> list[str]:
    """The command line of `serve` that means the same as these arguments."""
    words = [
        *("--model", args.model, "--runner", args.runner, "--topology", args.topology),
        *("--http-port", str(args.http_port), "--grpc-port", str(args.grpc_port)),
        *("--metrics-port", str(args.metrics_port), "--otlp-endpoint", args.otlp_endpoint),
        *("--ready-timeout", str(args.ready_timeout), "--state-dir", args.state_dir),
    ]
    for override in args.set:
        words += ["--set", override]
    return [*words, "--no-restart"] if args.no_restart else words


def _announce(console: Console, state: StateDir) -> None:
    record = state.deployed()
    if record is None:
        return
    lines = [
        f"{record.model} is up.  OpenAI {record.http}/v1   gRPC {record.grpc}",
        *(f"warning: {note}" for note in record.notes),
        f"stop:   {state.command('down')}",
        f"logs:   {state.command('logs')}",
        f"table:  {state.command('status')}",
        f"talk:   {state.command('chat')}",
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
