"""The `triptych` command: picks a subcommand and turns errors into one line and an exit code.

Each subcommand is a module with ``configure(parser)`` and ``run(args) -> exit code``, imported only when
it is the one that was asked for. Exit codes: 0 done, 1 failed, 2 a command line or configuration that
cannot work, 128 + n ended by signal n.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from services.cli.signals import INTERRUPTED, quiet_interrupt
from shared.errors import ConfigError, TriptychError

#: Subcommands: their module, and what they do.
COMMANDS = {
    "demo": ("services.cli.demo", "ask a text and a picture question of six processes, show a timeline"),
    "up": ("services.cli.up", "start every process and show a live table; --detach returns when ready"),
    "serve": ("services.cli.serve", "as up, without a table: for service managers and containers"),
    "down": ("services.cli.down", "stop what up or serve started"),
    "status": ("services.cli.status", "show the table of processes once"),
    "logs": ("services.cli.logs", "show or follow the logs"),
    "chat": ("services.cli.chat", "talk to the model through the OpenAI API"),
    "doctor": ("services.cli.doctor", "say what is missing on this machine"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Main thread only."""
    with quiet_interrupt():
        command, parsed = _parsed(list(sys.argv[1:] if argv is None else argv))
    try:
        code: int = command.run(parsed)
        sys.stdout.flush()
    except TriptychError as error:
        print(f"triptych {parsed.command}: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone: what is still buffered must not be tried again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


def _parsed(words: Sequence[str]) -> tuple[ModuleType, argparse.Namespace]:
    """The module of the command that these words name, and its arguments. Exits when there is none."""
    parser = argparse.ArgumentParser(
        prog="triptych", description="Disaggregated serving: encode, prefill, decode."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    wanted = next((word for word in words if not word.startswith("-")), "")
    for name, (module, text) in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text)
        if name == wanted:
            importlib.import_module(module).configure(sub)
    parsed = parser.parse_args(words)
    return importlib.import_module(COMMANDS[parsed.command][0]), parsed


if __name__ == "__main__":
    sys.exit(main())
