"""The disk tier: records as files in one directory, bounded in bytes, found again after a restart.

Owns jobs and decisions; the index, files, threads and the byte counter have homes of their own
(``disk_index``, ``disk_files``, ``disk_io``, ``disk_room``). Everything is decided on the caller's thread and
nothing there waits; threads do as told and hand outcomes back, which every call takes in first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

from shared.clock import Clock
from shared.errors import ConfigError
from shared.failpoints import Failpoints
from shared.telemetry.logs import get_logger
from shared.tiering.disk_files import TEMP, Files, key_of, occupied, path_of
from shared.tiering.disk_index import DiskIndex, Entry
from shared.tiering.disk_io import Context, DiskPool, Inventory, Leave, Quarantine, Read, Write
from shared.tiering.disk_room import Room, WriteSwitch
from shared.tiering.disk_scan import scan
from shared.tiering.eviction import EvictionPolicy
from shared.tiering.offload import (
    KEY_BYTES,
    JobDone,
    LoadItem,
    OffloadTier,
    Presence,
    StoreItem,
    TierObserver,
)
from shared.tiering.record import REASONS, PayloadCheck, verify_payload

_log = get_logger(__name__)

#: What a failed read says of the file, by the task's word for it; other failures say nothing.
_BROKEN = {reason: reason for reason in REASONS} | {"EIO": "io", "ELOOP": "io"}


@dataclass(slots=True)
class _Job:
    """``order``: its keys as asked for; ``num_waiting``: those without an outcome so far."""

    order: tuple[bytes, ...]
    num_waiting: int = 0
    stored: set[bytes] = field(default_factory=set)
    loaded: dict[bytes, bytes] = field(default_factory=dict)
    corrupt: set[bytes] = field(default_factory=set)


@dataclass(slots=True)
class _Writing:
    """A record on its way: the jobs that want it, and whether it was removed meanwhile."""

    jobs: list[int]
    removed: bool = False


class DiskTier(OffloadTier):
    """See OffloadTier. ``capacity_bytes`` is a hard bound on the files, whole pages counted, quarantine
    included. The constructor reads the directory (blocking) and raises ConfigError when it cannot be used.

    A failing medium (full, read-only, broken) is no error: writes are off for a while, reads go on.
    """

    def __init__(
        self,
        directory: Path,
        capacity_bytes: int,
        policy: EvictionPolicy[bytes],
        *,
        clock: Clock,
        failpoints: Failpoints,
        observer: TierObserver | None = None,
        name: str = "disk",
        num_readers: int = 4,
        num_writers: int = 4,
        max_quarantined: int = 16,
        check_payload: PayloadCheck = verify_payload,
    ) -> None:
        if min(capacity_bytes, num_readers, num_writers) < 1 or max_quarantined < 0:
            raise ConfigError("a disk tier needs room and threads")
        self.name = name
        self._observer = observer or TierObserver()
        self._index = DiskIndex(policy, clock, self._observer)
        self._switch = WriteSwitch(clock)
        self._jobs: dict[int, _Job] = {}
        self._done: list[JobDone] = []
        self._writing: dict[bytes, _Writing] = {}
        self._reading: dict[Read, tuple[int, Entry]] = {}
        self._leaving: dict[str, Event] = {}
        #: Files that could not be removed; they count.
        self._strays: dict[str, int] = {}
        #: Paths that changed since the running inventory began; None without one.
        self._changed: set[str] | None = None
        self._wake: Callable[[], None] = lambda: None
        self._files = Files(directory, failpoints)
        try:
            quarantine = Quarantine(self._files, max_quarantined, capacity_bytes // 4)
            self._restore(quarantine)
        except OSError as error:
            self._files.close()
            raise ConfigError(f"the disk tier cannot read {directory}: {error.strerror}") from error
        #: Bytes there will be when all that was decided is done.
        self._planned = self._index.held_bytes + quarantine.num_bytes + sum(self._strays.values())
        self._room = Room(capacity_bytes, self._planned)
        at = Context(self._files, self._room, quarantine, clock, check_payload)
        self._readers = DiskPool(at, f"{name}-read", num_readers)
        self._writers = DiskPool(at, f"{name}-write", num_writers)
        self._writers.run(self._make_room(0))  # the bound may be lower than last time
        self._writers.drain()
        self._take_in()

    # --- the interface ---------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        self._take_in()
        return [self._presence(key) for key in keys]

    def submit_store(self, job_id: int, items: Sequence[StoreItem]) -> None:
        self._take_in()
        wanted = {item.key: item for item in reversed(items)}
        job = self._begin(job_id, [item.key for item in items])
        job.stored.update(key for key in job.order if key in self._index)
        self._index.touch(job.order)
        leaves: list[Leave] = []
        writes: list[Write] = []
        with self._index.pinned(job.order):  # a job's records make no room for each other
            for key in job.order:
                if key in self._writing:
                    self._writing[key].jobs.append(job_id)
                    self._writing[key].removed = False
                    job.num_waiting += 1
                elif key not in job.stored and (write := self._admit(wanted[key], leaves)):
                    self._writing[key] = _Writing([job_id])
                    job.num_waiting += 1
                    writes.append(write)
        self._writers.run([*leaves, *writes])  # in this order: a write may wait for removals
        self._end_at_once(job_id)

    def submit_load(self, job_id: int, items: Sequence[LoadItem]) -> None:
        self._take_in()
        wanted = {item.key: item.into for item in reversed(items)}
        job, reads = self._begin(job_id, [item.key for item in items]), list[Read]()
        for key in job.order:
            entry, into = self._index.get(key), wanted[key]
            if entry is not None and entry.payload_bytes == into.nbytes:
                reads.append(Read(key, entry.header_bytes, into))
                self._reading[reads[-1]] = (job_id, entry)
                entry.num_pins += 1
                job.num_waiting += 1
        self._readers.run(reads)
        self._end_at_once(job_id)

    def finished(self) -> list[JobDone]:
        self._take_in()
        done, self._done = self._done, []
        return done

    def set_wake(self, wake: Callable[[], None]) -> None:
        self._wake = self._readers.wake = self._writers.wake = wake

    def remove(self, keys: Sequence[bytes]) -> None:
        self._take_in()
        leaves: list[Leave] = []
        for key in keys:
            if key in self._writing:
                self._writing[key].removed = True
            elif key in self._index:
                leaves.append(self._leave(path_of(key), self._index.pop(key, "removed").nbytes))
        self._writers.run(leaves)

    @property
    def num_bytes(self) -> int:
        return self._room.used_bytes

    @property
    def capacity_bytes(self) -> int:
        return self._room.capacity_bytes

    @property
    def writable(self) -> bool:
        return self._switch.on

    @property
    def num_records(self) -> int:
        """Records that can be loaded."""
        return len(self._index)

    def reconcile(self) -> None:
        """Begin to compare the index and the counter with the directory; call it now and then. Files that
        do not belong are removed, records whose file is gone are forgotten."""
        self._take_in()
        if self._changed is None:
            self._changed = set()
            self._writers.run([Inventory(self._index.copy())])

    def close(self) -> None:
        for pool in (self._readers, self._writers, self._writers):  # outcomes may bring removals
            pool.drain()
            self._take_in()
        self._readers.close()
        self._writers.close()
        self._files.close()

    # --- jobs ------------------------------------------------------------------------------------

    def _begin(self, job_id: int, keys: Iterable[bytes]) -> _Job:
        job = _Job(tuple(dict.fromkeys(keys)))
        if any(len(key) != KEY_BYTES for key in job.order):
            raise ValueError(f"keys have {KEY_BYTES} bytes")
        self._jobs[job_id] = job
        return job

    def _end_at_once(self, job_id: int) -> None:
        """End a job for which nothing has to be done."""
        if not self._jobs[job_id].num_waiting:
            self._end(job_id)
            self._wake()

    def _one_less(self, job_id: int) -> None:
        self._jobs[job_id].num_waiting -= 1
        if not self._jobs[job_id].num_waiting:
            self._end(job_id)

    def _end(self, job_id: int) -> None:
        job = self._jobs.pop(job_id)
        self._index.enlist(job.order)
        loaded, stored = (tuple(filter(keys.__contains__, job.order)) for keys in (job.loaded, job.stored))
        self._index.touch(loaded)
        self._done.append(JobDone(job_id, stored, job.loaded, job.corrupt))

    # --- decisions -------------------------------------------------------------------------------

    def _presence(self, key: bytes) -> Presence:
        if key in self._index:
            return Presence.YES
        writing = self._writing.get(key)
        return Presence.NO if writing is None or writing.removed else Presence.NOT_YET

    def _admit(self, item: StoreItem, leaves: list[Leave]) -> Write | None:
        """A write with room for it, or None; the removals that make the room join ``leaves``."""
        path = path_of(item.key)
        write = Write(item.key, item.header, item.payload, self._leaving.get(path))
        fits = self._planned - self._index.held_bytes + write.nbytes <= self.capacity_bytes
        if not fits or not self._switch.on:
            return None
        leaves += self._make_room(write.nbytes)
        if self._planned + write.nbytes > self.capacity_bytes or not self._switch.begin():
            return None
        write.ticket = self._room.ticket
        self._planned += write.nbytes
        self._mark(path)
        return write

    def _make_room(self, nbytes: int) -> list[Leave]:
        """Evict until so many bytes more would fit, or nothing can be evicted."""
        evicted = self._index.evict(lambda: self._planned + nbytes > self.capacity_bytes)
        return [self._leave(path_of(key), entry.nbytes) for key, entry in evicted]

    def _leave(self, path: str, counted_bytes: int, reason: str = "") -> Leave:
        """The removal of a file, or its quarantine when there is a ``reason``; to be run at once."""
        leave = Leave(path, counted_bytes, reason, self._room.leaving())
        self._leaving[path] = leave.gone
        self._planned -= leave.expected_bytes
        self._mark(path)
        return leave

    def _set_aside(self, key: bytes, reason: str) -> Leave:
        _log.warning("a stored record does not verify", tier=self.name, reason=reason)
        self._observer.quarantined(reason)
        return self._leave(path_of(key), self._index.pop(key, "quarantined").nbytes, reason)

    def _forget(self, key: bytes) -> None:
        """A record's file is gone, by somebody else's hand."""
        self._mark(path_of(key))
        self._give(self._index.pop(key, "missing").nbytes)

    def _give(self, nbytes: int) -> None:
        self._planned -= nbytes
        self._room.give(nbytes)

    def _mark(self, path: str) -> None:
        if self._changed is not None:
            self._changed.add(path)

    # --- outcomes --------------------------------------------------------------------------------

    def _take_in(self) -> None:
        leaves: list[Leave] = []
        for task in (*self._readers.ended(), *self._writers.ended()):
            if isinstance(task, Read):
                leaves += self._on_read(task)
            elif isinstance(task, Write):
                leaves += self._on_written(task)
            elif isinstance(task, Leave):
                self._on_left(task)
            elif isinstance(task, Inventory):
                leaves += self._on_inventory(task)
        self._writers.run(leaves)

    def _on_read(self, read: Read) -> list[Leave]:
        job_id, entry = self._reading.pop(read)
        entry.num_pins -= 1
        leaves: list[Leave] = []
        is_here = self._index.get(read.key) is entry
        if not read.problem:
            self._jobs[job_id].loaded[read.key] = read.header
            self._observer.loaded(entry.header_bytes + entry.payload_bytes, read.seconds)
        elif reason := _BROKEN.get(read.problem):
            self._jobs[job_id].corrupt.add(read.key)
            leaves += [self._set_aside(read.key, reason)] if is_here else []
        elif read.problem == "ENOENT" and is_here:
            self._forget(read.key)
        self._one_less(job_id)
        return leaves

    def _on_written(self, write: Write) -> list[Leave]:
        writing = self._writing.pop(write.key)
        path = path_of(write.key)
        self._mark(path)
        leaves: list[Leave] = []
        if write.from_medium:
            self._on_medium_failed(write.problem or "EIO")
        else:
            self._switch.ended(written=not write.problem)
        if write.left_path:
            self._strays[write.left_path] = write.nbytes
        elif write.problem:
            self._planned -= write.nbytes
        else:
            self._give(self._strays.pop(path, 0))  # it was replaced
            self._observer.stored(len(write.header) + write.payload.nbytes, write.seconds)
            if writing.removed:
                leaves.append(self._leave(path, write.nbytes))
            else:
                self._index.add(write.key, len(write.header), write.payload.nbytes)
        for job_id in writing.jobs:
            if write.key in self._index:
                self._jobs[job_id].stored.add(write.key)
            self._one_less(job_id)
        return leaves

    def _on_medium_failed(self, error: str) -> None:
        self._observer.write_failed(error)
        if self._switch.failed():
            _log.warning("writes are off", tier=self.name, error=error)
            self._observer.disabled()

    def _on_left(self, leave: Leave) -> None:
        if self._leaving.get(leave.path) is leave.gone:
            del self._leaving[leave.path]
        self._mark(leave.path)
        self._planned += leave.expected_bytes - leave.freed_bytes
        if leave.problem:
            self._strays[leave.path] = leave.actual_bytes

    def _on_inventory(self, inventory: Inventory) -> list[Leave]:
        changed, self._changed = self._changed or set(), None
        self._planned -= inventory.quarantine_freed_bytes
        error = -inventory.quarantine_freed_bytes
        for key in inventory.missing:
            if path_of(key) not in changed:
                error -= self._index[key].nbytes
                self._forget(key)
        leaves: list[Leave] = []
        for path, nbytes in inventory.surplus.items():
            key = key_of(path)
            if path in changed or path in self._leaving or key in self._writing:
                continue
            if key in self._index:
                error += nbytes - self._index[key].nbytes
                leaves.append(self._set_aside(key, "length"))
            else:
                counted = self._strays.pop(path, 0)
                error += nbytes - counted
                leaves.append(self._leave(path, counted))
        self._observer.reconciled(error)
        return leaves

    # --- start -----------------------------------------------------------------------------------

    def _restore(self, quarantine: Quarantine) -> None:
        found, bad = scan(self._files)
        now_ns = self._files.now_ns()
        for record in found:
            idle_s = max(0, now_ns - record.mtime_ns) / 1e9
            self._index.add(record.key, record.header_bytes, record.payload_bytes, idle_s)
            self._index.enlist((record.key,))
        for file in bad:
            _log.warning("a stored record does not verify", tier=self.name, reason=file.reason)
            self._observer.quarantined(file.reason)
            kept, _ = quarantine.add(file.path, file.counted_bytes, file.reason)
            if not kept and not self._files.unlink(file.path):
                self._strays[file.path] = file.counted_bytes
        for left in self._files.listing(TEMP):
            self._strays[left.path] = occupied(left.nbytes)
