"""What `up`, `serve` and `demo` have in common: their options, and progress on the terminal."""

from __future__ import annotations

import argparse
import itertools
import os
from dataclasses import replace

from rich.console import Console
from rich.status import Status

from services.cli.arguments import port, seconds
from services.cli.deployment import Progress
from services.cli.modeldir import DEMO_MODEL, is_built, resolve_model
from services.cli.ports import PublicPorts
from services.cli.preflight import read_model, refuse_taken_ports
from services.cli.state import StateDir, add_state_option, state_of
from services.cli.topology import LaunchOptions, Topology, plan
from shared.config.services import ModelConfig


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """The options of a deployment; ``launch_options`` reads them back."""
    ports = PublicPorts()
    add = parser.add_argument
    add(
        "--model",
        default=DEMO_MODEL,
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
        type=port,
        default=ports.http,
        metavar="PORT",
        help=f"OpenAI API, default {ports.http}",
    )
    add("--grpc-port", type=port, default=ports.grpc, metavar="PORT", help=f"gRPC API, default {ports.grpc}")
    add("--metrics-port", type=port, default=ports.metrics, metavar="PORT", help=f"default {ports.metrics}")
    add("--otlp-endpoint", default="", metavar="HOST:PORT", help="where to send traces; default: nowhere")
    add("--no-restart", action="store_true", help="leave dead what dies")
    add("--ready-timeout", type=seconds, default=120.0, metavar="SECONDS")
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
    """Topology and options from the command line; builds or downloads the model when it is not there.

    A model that reads no pictures gets no encoder unless one is asked for. Raises ConfigError.
    """
    model = ModelConfig(path="", runner=args.runner, cache_dir=str(state.cache))
    options = LaunchOptions(
        model=model,
        ports=PublicPorts(args.http_port, args.grpc_port, args.metrics_port),
        otlp_endpoint=args.otlp_endpoint,
        overrides=tuple(args.set),
        num_cores=len(os.sched_getaffinity(0)),
    )
    _check_before_building(args, state, options)
    model = replace(model, path=str(resolve_model(args.model, state, progress)))
    usual = Topology() if read_model(model).sees else Topology(encoders=0)
    return Topology.parse(args.topology, usual), replace(options, model=model)


def _check_before_building(args: argparse.Namespace, state: StateDir, options: LaunchOptions) -> None:
    """Raises ConfigError for what is wrong whatever the model is, so that none is built in vain.

    Ports are left for later where nothing is to be built, and where processes run that an earlier launcher
    left behind: those will be ended first.
    """
    topology = Topology.parse(args.topology)
    if args.model == DEMO_MODEL and not is_built(state) and not any(p.alive for p in state.processes()):
        refuse_taken_ports(plan(topology, options, itertools.repeat(0)))


def prepared_state(args: argparse.Namespace) -> StateDir:
    """The state directory that the arguments name, with its folders. Raises ConfigError."""
    state = state_of(args)
    state.prepare()
    return state


class ProgressLine:
    """One line that changes on a terminal; one line a change elsewhere. Ends at the exit of its block."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None

    def __call__(self, text: str) -> None:
        if not self._console.is_terminal:
            self.keep(text)
        elif self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        else:
            self._status.update(text)

    def keep(self, text: str) -> None:
        """Print a line that stays, above the one that changes."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def pause(self) -> None:
        """Clear the line, so that other output may follow."""
        if self._status is not None:
            self._status.stop()
            self._status = None
