"""`triptych serve`: start every process and keep them running, with plain lines instead of a table."""

from __future__ import annotations

import argparse

from services.cli.deployment import deployed
from services.cli.launch import add_launch_options, launch_options, prepared_state
from services.cli.signals import Interrupted, stop_on_signals


def configure(parser: argparse.ArgumentParser) -> None:
    add_launch_options(parser)


def run(args: argparse.Namespace) -> int:
    """0 when a signal ended what was ready; 128 + its number when it was not ready yet."""
    state = prepared_state(args)
    topology, options = launch_options(args, state, _say)
    with stop_on_signals() as stopping:
        try:
            with deployed(
                state,
                topology,
                options,
                restart=not args.no_restart,
                ready_timeout_s=args.ready_timeout,
                progress=_say,
                warn=_say,
                stopping=stopping,
            ) as deployment:
                _say(f"ready: {deployment.http_url}/v1")
                stopping.wait()
        except Interrupted:
            return stopping.exit_code
    return 0


def _say(text: str) -> None:
    print(text, flush=True)
