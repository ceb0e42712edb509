"""The `triptych` command: picks a subcommand and turns errors into one line and an exit code.

Each subcommand is a module with ``configure(parser)`` and ``run(args) -> exit code``, imported only when
it is the one that was asked for.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from shared.errors import TriptychError

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
    """Run one command; returns its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="triptych", description="Disaggregated serving: encode, prefill, decode."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    wanted = next((word for word in args if not word.startswith("-")), "")
    for name, (module, text) in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text)
        if name == wanted:
            importlib.import_module(module).configure(sub)
    parsed = parser.parse_args(args)
    try:
        code: int = importlib.import_module(COMMANDS[parsed.command][0]).run(parsed)
    except TriptychError as error:
        print(f"triptych {parsed.command}: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output is gone; say nothing more
        return 141
    return code


if __name__ == "__main__":
    sys.exit(main())
