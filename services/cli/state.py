"""The state directory of one deployment: lock, description, pid files, logs, generated configuration.

Owns the files, what they mean, and the option that names the directory; starts and stops nothing. A held
lock, not a file's presence, says that a launcher is alive, so whatever a killed launcher left behind is
recognised as stale. Nothing but the standard library: `doctor` must run before anything is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_origin, get_type_hints

from services.cli import procfs
from shared.errors import ConfigError, InternalError

DEFAULT_DIR = ".triptych"
R = TypeVar("R")


@dataclass(frozen=True)
class ProcessRecord:
    """One started process. ``started`` is its start in kernel ticks: with the pid, its identity."""

    name: str
    kind: str
    pid: int
    started: int
    restarts: int = 0

    @property
    def alive(self) -> bool:
        """Whether exactly this process (not a later one of the same pid) still runs."""
        return procfs.start_ticks(self.pid) == self.started


@dataclass(frozen=True)
class Deployed:
    """What runs: the launcher, public addresses, and metrics addresses by process name; ``notes`` are what
    a user should know of its configuration."""

    launcher_pid: int
    model: str
    http: str
    grpc: str
    metrics: dict[str, str]
    ready: bool = False
    notes: tuple[str, ...] = ()


class AlreadyUp(InternalError):
    """Another launcher holds this state directory."""

    code = "already_up"


class StateLost(InternalError):
    """The state directory was taken from under its launcher."""

    code = "state_lost"


def add_state_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--state-dir", default=DEFAULT_DIR, metavar="DIR", help=f"default {DEFAULT_DIR}")


def state_of(args: argparse.Namespace) -> StateDir:
    """The state directory that the arguments name, as it is. Raises ConfigError when it cannot be one."""
    if not args.state_dir:
        raise ConfigError("--state-dir: no directory named")
    state = StateDir(Path(args.state_dir))
    state.check()
    return state


class StateDir:
    """Paths and records under one directory. Every method may be called from any thread."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.configs = self.root / "config"
        self.logs = self.root / "logs"
        self.pids = self.root / "pids"
        self.models = self.root / "models"
        self.cache = self.root / "cache"
        self.folders = (self.configs, self.logs, self.pids, self.models, self.cache)
        self._held: os.stat_result | None = None

    def check(self) -> None:
        """Raises ConfigError when something is there that is not a readable directory. Creates nothing."""
        try:
            os.listdir(self.root)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise self.unusable(error) from None

    def prepare(self) -> None:
        """Create what is missing. Raises ConfigError when that cannot be done, or nothing can be written."""
        try:
            for folder in self.folders:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self.unusable(error) from None
        for folder in (self.root, *self.folders):
            if not os.access(folder, os.W_OK | os.X_OK):
                raise ConfigError(f"cannot use the state directory {self.root}: {folder} is not writable")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory as its launcher. Raises AlreadyUp: another does; ConfigError as ``prepare``."""
        self.prepare()
        try:
            file = (self.root / "lock").open("a")
        except OSError as error:
            raise self.unusable(error) from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self.already_up() from None
            with contextlib.suppress(OSError):  # no room: then run.json has to say it
                file.truncate(0)
                file.write(str(os.getpid()))
                file.flush()
            self._held = os.fstat(file.fileno())
            try:
                yield
            finally:
                self._held = None

    def is_lost(self) -> bool:
        """Whether the directory that this object holds is gone, or another one has taken its place. Its
        launcher may neither write to it any more nor start anything from it."""
        if self._held is None:
            return False
        try:
            there = (self.root / "lock").stat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False
        return not os.path.samestat(self._held, there)

    def lost(self) -> StateLost:
        return StateLost(
            f"the state directory {self.root} was removed or replaced while it was in use; "
            "everything started from it is stopped"
        )

    def lost_launchers(self) -> list[int]:
        """Pids of launchers that hold the lock of an earlier directory of this name: it was removed under
        them. A launcher is known by its lock's content, since those who only look open it too."""
        lock = Path(os.path.realpath(self.root)) / "lock"
        found = []
        for pid, opened in procfs.with_open_file(lock):
            with contextlib.suppress(OSError):
                stale = not lock.exists() or not opened.samefile(lock)
                if stale and opened.read_text(encoding="ascii", errors="replace") == str(pid):
                    found.append(pid)
        return found

    def is_held(self) -> bool:
        """Whether a launcher is alive. Raises ConfigError when that cannot be known."""
        try:
            with (self.root / "lock").open("r") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        except OSError as error:
            raise self.unusable(error) from None
        return False

    def launcher_pid(self) -> int | None:
        """Who holds the directory, as far as it could be written down."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.root / "lock").read_text(encoding="ascii"))
        return None

    def already_up(self) -> AlreadyUp:
        return AlreadyUp(f"already up (state in {self.root}); stop it with: {self.command('down')}")

    def command(self, verb: str) -> str:
        """What to type for another command on this directory: by make for who came by make."""
        option = [] if self.root == Path(DEFAULT_DIR).absolute() else ["--state-dir", str(self.root)]
        if not sys.argv[0].endswith("services/cli/__main__.py"):
            return shlex.join(["triptych", verb, *option])
        return f"make {verb}" + (f" ARGS={shlex.quote(shlex.join(option))}" if option else "")

    def log_file(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def config_file(self, name: str) -> Path:
        return self.configs / f"{name}.yaml"

    def unusable(self, error: OSError) -> ConfigError:
        """What to tell a user whose state directory failed us."""
        where = f" ({error.filename})" if error.filename not in (None, str(self.root)) else ""
        return ConfigError(f"cannot use the state directory {self.root}: {error.strerror}{where}")

    # --- records

    def write_deployed(self, deployed: Deployed) -> None:
        self._write(self.root / "run.json", deployed)

    def deployed(self) -> Deployed | None:
        """The description of the last deployment; None when there is none (or it is unreadable)."""
        return _read(self.root / "run.json", Deployed)

    def write_process(self, record: ProcessRecord) -> None:
        self._write(self.pids / f"{record.name}.pid", record)

    def processes(self) -> list[ProcessRecord]:
        """Every recorded process, alive or not, by name."""
        records = (_read(path, ProcessRecord) for path in sorted(self.pids.glob("*.pid")))
        return [record for record in records if record is not None]

    def forget(self) -> None:
        """Remove the records of a deployment that has ended; logs and models stay."""
        for path in (*self.pids.glob("*.pid"), self.root / "run.json"):
            path.unlink(missing_ok=True)

    @staticmethod
    def _write(path: Path, record: Deployed | ProcessRecord) -> None:
        """Readers see the old content or the new, never a part."""
        temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
        try:
            temporary.write_text(json.dumps(dataclasses.asdict(record)), encoding="utf-8")
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def _read(path: Path, cls: type[R]) -> R | None:
    """A record as it was written; None when it cannot be read or is something else."""
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        record = cls(**{**values, **lists})
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    kinds = {name: get_origin(hint) or hint for name, hint in get_type_hints(cls).items()}
    sound = all(isinstance(getattr(record, name), kind) for name, kind in kinds.items())
    return record if sound else None
