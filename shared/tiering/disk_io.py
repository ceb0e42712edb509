"""The blocking work of a disk tier, in its threads: writes, reads, removals, as tasks with an outcome.

Owns what a task does and the order of tasks; decides nothing. Each task ends as done or with a
word for what was wrong, and never by an exception.
"""

from __future__ import annotations

import errno
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import Protocol

from shared.clock import Clock
from shared.failpoints import FailpointError
from shared.telemetry.logs import get_logger
from shared.tiering.disk_files import FOLDERS, QUARANTINE, TEMP, Files, key_of, occupied, path_of
from shared.tiering.disk_room import Room
from shared.tiering.record import CorruptRecord, PayloadCheck, decode_header

_log = get_logger(__name__)


@dataclass(slots=True)
class Context:
    """What every task works with."""

    files: Files
    room: Room
    quarantine: Quarantine
    clock: Clock
    check_payload: PayloadCheck


@dataclass(slots=True, eq=False)
class Task(ABC):
    """One thing to do. ``problem`` is empty when it was done; ``seconds`` is what it took."""

    problem: str = field(default="", init=False)
    seconds: float = field(default=0.0, init=False)

    def run(self, at: Context, mtime_ns: int) -> None:
        """In a thread: do it. Sets the outcome, raises nothing."""
        began = at.clock.now()
        try:
            self._run(at, mtime_ns)
        except OSError as error:
            self.problem = errno.errorcode.get(error.errno or 0, "other")
        except CorruptRecord as error:
            self.problem = error.reason
        except FailpointError:
            self.problem = "failpoint"
        except Exception as error:  # a lost task would be a job that never ends
            _log.error("a disk task failed", error=repr(error))
            self.problem = "other"
        self.seconds = at.clock.now() - began

    @abstractmethod
    def _run(self, at: Context, mtime_ns: int) -> None: ...


@dataclass(slots=True, eq=False)
class Write(Task):
    """Write one record. ``after``: set once an earlier file of this key is gone. ``ticket``: removals up to
    this one make room for it.

    On a problem nothing is left and the room is given back, unless ``left_path`` could not be removed.
    ``from_medium`` says that the medium, not the record, was at fault.
    """

    key: bytes
    header: bytes
    payload: memoryview
    after: threading.Event | None
    ticket: int = 0
    left_path: str = field(default="", init=False)
    from_medium: bool = field(default=False, init=False)

    @property
    def nbytes(self) -> int:
        """What the file counts."""
        return occupied(len(self.header) + self.payload.nbytes)

    @property
    def folder(self) -> str:
        return path_of(self.key).partition("/")[0]

    def _run(self, at: Context, mtime_ns: int) -> None:
        record = decode_header(self.header)  # what could not be found again is not written
        if record.key != self.key or record.payload_bytes != self.payload.nbytes:
            raise CorruptRecord("key")
        if self.after is not None:
            self.after.wait()
        if not at.room.take(self.nbytes, self.ticket):
            self.problem = "no_room"
            return
        with at.files.temp(self.key) as temp:
            try:
                at.files.write(temp, self.key, self.header, self.payload, mtime_ns)
            except (OSError, FailpointError) as error:
                self.from_medium = isinstance(error, OSError)
                if at.files.unlink(temp):
                    at.room.give(self.nbytes)
                else:
                    self.left_path = temp
                raise


@dataclass(slots=True, eq=False)
class Read(Task):
    """Read one record into ``into``, and verify it as its own. ``header`` is what was read."""

    key: bytes
    header_bytes: int
    into: memoryview
    header: bytes = field(default=b"", init=False)

    def _run(self, at: Context, mtime_ns: int) -> None:
        header = at.files.read(self.key, self.header_bytes, self.into, mtime_ns)
        record = decode_header(header)
        if record.key != self.key:
            raise CorruptRecord("key")
        at.check_payload(record, self.into)
        self.header = header


@dataclass(slots=True, eq=False)
class Leave(Task):
    """Take one file away: into quarantine when there is a ``reason``, for good otherwise.

    ``counted_bytes`` of it are in the room. ``freed_bytes``: what the room got back, of this file or of
    older ones in quarantine. On a problem the file is where it was, and ``actual_bytes`` of it count.
    """

    path: str
    counted_bytes: int
    reason: str
    ticket: int
    gone: threading.Event = field(default_factory=threading.Event, init=False)
    freed_bytes: int = field(default=0, init=False)
    actual_bytes: int = field(default=0, init=False)

    @property
    def expected_bytes(self) -> int:
        """What it should free: what is in quarantine still counts."""
        return 0 if self.reason else self.counted_bytes

    def run(self, at: Context, mtime_ns: int) -> None:
        at.room.begun(self.ticket)
        Task.run(self, at, mtime_ns)
        at.room.left(self.freed_bytes)
        self.gone.set()

    def _run(self, at: Context, mtime_ns: int) -> None:
        self.actual_bytes = occupied(at.files.size(self.path))
        self.freed_bytes = self.counted_bytes - self.actual_bytes  # somebody else may have cut it
        if self.reason:
            kept, freed = at.quarantine.add(self.path, self.actual_bytes, self.reason)
            self.freed_bytes += freed
            if kept:
                return
        if at.files.unlink(self.path):
            self.freed_bytes += self.actual_bytes
        else:
            self.problem = "stuck"


class Counted(Protocol):
    @property
    def nbytes(self) -> int: ...


@dataclass(slots=True, eq=False)
class Inventory(Task):
    """Compare the directory with the records that should be there.

    ``missing``: records without a file. ``surplus``: files that are no record's, or of another length than
    the record's, and what they count. ``quarantine_freed_bytes``: what others took out of quarantine.
    """

    expected: Mapping[bytes, Counted]
    missing: list[bytes] = field(default_factory=list, init=False)
    surplus: dict[str, int] = field(default_factory=dict, init=False)
    quarantine_freed_bytes: int = field(default=0, init=False)

    def _run(self, at: Context, mtime_ns: int) -> None:
        found: set[bytes] = set()
        for folder in (*FOLDERS, TEMP):
            for file in at.files.listing(folder):
                key = key_of(file.path)
                found.add(key)
                counted, nbytes = self.expected.get(key), occupied(file.nbytes)
                if counted is not None and counted.nbytes == nbytes:
                    continue
                if at.files.is_orphan(file.path):
                    self.surplus[file.path] = nbytes
        self.missing = [key for key in self.expected if key not in found]
        self.quarantine_freed_bytes = at.quarantine.recount()
        at.room.give(self.quarantine_freed_bytes)


class Quarantine:
    """Files that did not verify, kept for a person to look at: the newest ``max_files``, and no more than
    ``max_bytes`` of them. Their bytes count. Any thread."""

    def __init__(self, files: Files, max_files: int, max_bytes: int) -> None:
        self._files = files
        self._max_files = max_files
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._held = {file.path: occupied(file.nbytes) for file in files.listing(QUARANTINE)}
        numbers = (path.rpartition("/")[2].partition("-")[0] for path in self._held)
        self._last = max((int(n) for n in numbers if n.isdecimal()), default=0)
        self._shrink()

    @property
    def num_files(self) -> int:
        return len(self._held)

    @property
    def num_bytes(self) -> int:
        return sum(self._held.values())

    def add(self, path: str, nbytes: int, reason: str) -> tuple[bool, int]:
        """Move a file here. Returns whether it is here, and the bytes of older ones that were removed."""
        with self._lock:
            if nbytes > self._max_bytes or not self._max_files:
                return False, 0
            self._last += 1
            name = path.rpartition("/")[2][:64]
            held = f"{QUARANTINE}/{self._last:08d}-{reason}-{name}"
            if not self._files.rename(path, held):
                return False, 0
            self._held[held] = nbytes
            return True, self._shrink()

    def recount(self) -> int:
        """Notice what was taken out by others; returns its bytes."""
        with self._lock:
            there = {file.path for file in self._files.listing(QUARANTINE)}
            return sum(self._held.pop(path) for path in [p for p in self._held if p not in there])

    def _shrink(self) -> int:
        freed = 0
        for path in sorted(self._held):
            if len(self._held) <= self._max_files and self.num_bytes <= self._max_bytes:
                break
            if self._files.unlink(path):
                freed += self._held.pop(path)
        return freed


class _Batch:
    """Tasks of one call, shared by several threads in order; the first has the newest stamp."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._left = deque(enumerate(tasks))
        self._lock = threading.Lock()
        self._base_ns: int | None = None

    def next(self, now_ns: Callable[[], int]) -> tuple[Task, int] | None:
        with self._lock:
            if not self._left:
                return None
            if self._base_ns is None:
                self._base_ns = now_ns()
            rank, task = self._left.popleft()
            return task, self._base_ns - 1000 * rank


class DiskPool:
    """Threads that run batches; a batch's tasks begin in order, and batches one after the other.

    ``run`` and ``ended`` are for one thread; ``wake`` is called in any, after each part of a batch.
    """

    def __init__(self, at: Context, name: str, num_threads: int) -> None:
        self._at = at
        self._num_threads = num_threads
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._ended: deque[Task] = deque()
        self._parts: set[Future[None]] = set()
        self.wake: Callable[[], None] = lambda: None

    def run(self, tasks: Sequence[Task]) -> None:
        """Begin a batch; it may be empty."""
        batch = _Batch(tasks)
        for _ in range(min(self._num_threads, len(tasks))):
            part = self._executor.submit(self._run, batch)
            self._parts.add(part)
            part.add_done_callback(self._parts.discard)

    def _run(self, batch: _Batch) -> None:
        done: list[Task] = []
        while (taken := batch.next(self._at.files.now_ns)) is not None:
            task, mtime_ns = taken
            task.run(self._at, mtime_ns)
            done.append(task)
        self._sync(task for task in done if isinstance(task, Write) and not task.problem)
        if done:
            self._ended.extend(done)
            self.wake()

    def _sync(self, written: Iterable[Write]) -> None:
        """Once a part of a batch: only now is a record durable under its name."""
        by_folder: dict[str, list[Write]] = {}
        for task in written:
            by_folder.setdefault(task.folder, []).append(task)
        for folder, tasks in by_folder.items():
            try:
                self._at.files.sync_folders((folder,))
            except OSError:
                for task in tasks:  # there, to be read, and perhaps not after a power cut
                    task.from_medium = True

    def ended(self) -> list[Task]:
        """Tasks that ended since the last call."""
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def drain(self) -> None:
        """Wait until nothing runs."""
        while parts := list(self._parts):
            wait_for(parts)

    def close(self) -> None:
        self._executor.shutdown()
