"""What `up`, `serve` and `demo` have in common: their options, signals, and progress on the terminal."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.status import Status

from services.cli.deployment import Progress
from services.cli.modeldir import resolve_model
from services.cli.state import DEFAULT_DIR, StateDir
from services.cli.topology import LaunchOptions, PublicPorts, Topology
from shared.config.services import ModelConfig


def add_state_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--state-dir", default=DEFAULT_DIR, metavar="DIR", help=f"default {DEFAULT_DIR}")


def _port(text: str) -> int:
    port = int(text)
    if not 1 <= port <= 65535:
        raise argparse.ArgumentTypeError("a port lies between 1 and 65535")
    return port


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """The options of a deployment; ``launch_options`` reads them back."""
    ports = PublicPorts()
    add = parser.add_argument
    add(
        "--model",
        default="",
        metavar="DIR",
        help='a model directory, a hub id or "witness"; default: the demo model',
    )
    add("--runner", default="auto", choices=["auto", "torch", "witness"])
    add(
        "--topology",
        default="",
        metavar="e=1,p=1,d=2,s=1",
        help="numbers of encoders, prefills, decodes, stores",
    )
    add(
        "--http-port",
        type=_port,
        default=ports.http,
        metavar="PORT",
        help=f"OpenAI API, default {ports.http}",
    )
    add("--grpc-port", type=_port, default=ports.grpc, metavar="PORT", help=f"gRPC API, default {ports.grpc}")
    add("--metrics-port", type=_port, default=ports.metrics, metavar="PORT", help=f"default {ports.metrics}")
    add("--otlp-endpoint", default="", metavar="HOST:PORT", help="where to send traces; default: nowhere")
    add("--no-restart", action="store_true", help="leave dead what dies")
    add("--ready-timeout", type=float, default=120.0, metavar="SECONDS")
    add(
        "--set",
        action="append",
        default=[],
        metavar="[WHO:]KEY=VALUE",
        help="override configuration, e.g. decode:kv.memory_mb=512 or transfer.lease_s=10",
    )
    add_state_option(parser)


def launch_options(
    args: argparse.Namespace, state: StateDir, progress: Progress
) -> tuple[Topology, LaunchOptions]:
    """Topology and options from the command line; builds or downloads the model when it is not there."""
    topology = Topology.parse(args.topology)
    path = resolve_model(args.model, state, progress)
    options = LaunchOptions(
        model=ModelConfig(path=str(path), runner=args.runner, cache_dir=str(state.cache)),
        ports=PublicPorts(args.http_port, args.grpc_port, args.metrics_port),
        otlp_endpoint=args.otlp_endpoint,
        overrides=tuple(args.set),
        num_cores=len(os.sched_getaffinity(0)),
    )
    return topology, options


def state_of(args: argparse.Namespace) -> StateDir:
    """The state directory, with its folders."""
    state = StateDir(Path(args.state_dir))
    state.prepare()
    return state


@contextlib.contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """An event that Ctrl-C, TERM and HUP set; the old handlers come back at exit. Main thread only."""
    stopping = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda *_: stopping.set()) for number in numbers}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class ProgressLine:
    """One line that changes on a terminal; one line a change elsewhere. Ends at the exit of its block."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None

    def __call__(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)
        elif self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        else:
            self._status.update(text)

    def pause(self) -> None:
        """Clear the line, so that other output may follow."""
        if self._status is not None:
            self._status.stop()
            self._status = None
