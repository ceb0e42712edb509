"""The state directory of one deployment: lock, description, pid files, logs, generated configuration.

Owns the files and what they mean; starts and stops nothing. A held lock, not a file's presence, says that a
launcher is alive, so whatever a killed launcher left behind is recognised as stale.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from services.cli import procfs
from shared.errors import ConfigError

DEFAULT_DIR = ".triptych"


class ProcessRecord(msgspec.Struct, frozen=True):
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


class Deployed(msgspec.Struct, frozen=True):
    """What runs: the launcher, public addresses, and metrics addresses by process name."""

    launcher_pid: int
    model: str
    http: str
    grpc: str
    metrics: dict[str, str]
    ready: bool = False


class AlreadyUp(ConfigError):
    """Another launcher holds this state directory."""


class StateDir:
    """Paths and records under one directory. Every method may be called from any thread."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.configs = self.root / "config"
        self.logs = self.root / "logs"
        self.pids = self.root / "pids"
        self.models = self.root / "models"
        self.cache = self.root / "cache"

    def prepare(self) -> None:
        """Create what is missing."""
        for folder in (self.configs, self.logs, self.pids, self.models, self.cache):
            folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory as its launcher. Raises AlreadyUp when another does."""
        self.prepare()
        with (self.root / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise AlreadyUp(f"already up (state in {self.root}); stop it with: triptych down") from None
            yield

    def is_held(self) -> bool:
        """Whether a launcher is alive."""
        try:
            with (self.root / "lock").open("r") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def log_file(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def config_file(self, name: str) -> Path:
        return self.configs / f"{name}.yaml"

    # --- records

    def write_deployed(self, deployed: Deployed) -> None:
        self._write(self.root / "run.json", msgspec.json.encode(deployed))

    def deployed(self) -> Deployed | None:
        """The description of the last deployment; None when there is none (or it is unreadable)."""
        try:
            return msgspec.json.decode((self.root / "run.json").read_bytes(), type=Deployed)
        except (OSError, msgspec.DecodeError):
            return None

    def write_process(self, record: ProcessRecord) -> None:
        self._write(self.pids / f"{record.name}.pid", msgspec.json.encode(record))

    def processes(self) -> list[ProcessRecord]:
        """Every recorded process, alive or not, by name."""
        found = []
        for path in sorted(self.pids.glob("*.pid")):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                found.append(msgspec.json.decode(path.read_bytes(), type=ProcessRecord))
        return found

    def forget(self) -> None:
        """Remove the records of a deployment that has ended; logs and models stay."""
        for path in (*self.pids.glob("*.pid"), self.root / "run.json"):
            path.unlink(missing_ok=True)

    @staticmethod
    def _write(path: Path, data: bytes) -> None:
        """Readers see the old content or the new, never a part."""
        temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
        temporary.write_bytes(data)
        temporary.replace(path)
