"""`triptych logs`: the end of each process's log, and with -f whatever follows."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from services.cli.arguments import count
from services.cli.state import add_state_option, state_of
from services.cli.supervisor import tail
from shared.errors import NotFound

POLL_S = 0.2


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "services", nargs="*", metavar="SERVICE", help="names or their beginnings; default all"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="go on until Ctrl-C")
    parser.add_argument(
        "-n", "--lines", type=count, default=20, help="lines of each log to begin with, default 20"
    )
    add_state_option(parser)


def run(args: argparse.Namespace) -> int:
    state = state_of(args)
    there = sorted(state.logs.glob("*.log"))
    if not there:
        raise NotFound(f"no logs in {state.logs}")
    unknown = [name for name in args.services if not chosen(there, [name])]
    if unknown:
        raise NotFound(f"no logs of {', '.join(unknown)} (but {', '.join(path.stem for path in there)})")
    paths = chosen(there, args.services)
    width = max(len(path.stem) for path in paths)
    followers = [Follower(path) for path in paths]
    for path in paths:
        for line in tail(path, args.lines):
            print(f"{path.stem:{width}} | {line}")
    pause = threading.Event()
    while args.follow:
        for follower in followers:
            for line in follower.new_lines():
                print(f"{follower.path.stem:{width}} | {line}", flush=True)
        pause.wait(POLL_S)
    return 0


def chosen(paths: Sequence[Path], names: Sequence[str]) -> list[Path]:
    """The logs whose name begins with one of ``names``; all when there are none."""
    return [path for path in paths if not names or path.stem.startswith(tuple(names))]


class Follower:
    """Reads what is appended to one file from now on; starts over when the file is replaced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = path.stat().st_size
        self._inode = path.stat().st_ino
        self._partial = b""

    def new_lines(self) -> Iterator[str]:
        """Whole lines that were appended since the last call."""
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return
        if stat.st_ino != self._inode or stat.st_size < self._offset:
            self._inode, self._offset, self._partial = stat.st_ino, 0, b""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            yield line.decode("utf-8", errors="replace")
