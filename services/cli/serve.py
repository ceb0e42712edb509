"""`triptych serve`: start every process and keep them running, with plain lines instead of a table."""

from __future__ import annotations

import argparse

from services.cli.deployment import Interrupted, deployed
from services.cli.launch import add_launch_options, launch_options, state_of, stop_on_signals


def configure(parser: argparse.ArgumentParser) -> None:
    add_launch_options(parser)


def run(args: argparse.Namespace) -> int:
    state = state_of(args)
    with stop_on_signals() as stopping:
        try:
            topology, options = launch_options(args, state, _say)
            with deployed(
                state,
                topology,
                options,
                restart=not args.no_restart,
                ready_timeout_s=args.ready_timeout,
                progress=_say,
                stopping=stopping,
            ) as deployment:
                _say(f"ready: {deployment.http_url}/v1")
                stopping.wait()
        except Interrupted:
            return 130
    return 0


def _say(text: str) -> None:
    print(text, flush=True)
