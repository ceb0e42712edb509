"""An example of a lower tier from outside: an object store, here a plain directory with one object a record.

``ObjectStore`` is the part to replace by a client of the real thing: put, get, list, delete of whole
objects. Everything else is what such a tier needs: jobs in one thread, a bound in bytes (the object written
longest ago goes first), and no error that reaches the caller. See docs/tiers.md.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from shared.tiering.offload import JobDone, LoadItem, OffloadTier, Presence, StoreItem
from shared.tiering.record import CorruptRecord, header_length


class ObjectStore:
    """Objects by name. An object is there whole or not at all."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for partial in directory.glob(".*"):  # a crash's
            partial.unlink()

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        partial = self._directory / f".{name}"
        try:
            with partial.open("wb") as file:
                file.writelines(parts)
            partial.replace(self._directory / name)
        finally:
            partial.unlink(missing_ok=True)

    def get(self, name: str) -> bytes:
        return (self._directory / name).read_bytes()

    def sizes(self) -> dict[str, int]:
        """Bytes of every object, the oldest first."""
        found = [entry for entry in os.scandir(self._directory) if not entry.name.startswith(".")]
        return {
            entry.name: entry.stat().st_size for entry in sorted(found, key=lambda e: e.stat().st_mtime_ns)
        }

    def delete(self, name: str) -> None:
        (self._directory / name).unlink(missing_ok=True)


class DirectoryTier(OffloadTier):
    """See OffloadTier. The tables are the caller's thread's; the one worker thread gets what it needs as
    arguments, does it in the order in which it was asked, and hands back what it did."""

    def __init__(self, directory: str, capacity_bytes: int, name: str = "directory") -> None:
        self.name = name
        self._capacity_bytes = capacity_bytes
        self._objects = ObjectStore(Path(directory))
        self._sizes = self._objects.sizes()
        self._coming: dict[str, int] = {}
        self._num_bytes = sum(self._sizes.values())
        self._removed: set[str] = set()
        self._ended: deque[tuple[JobDone, dict[str, bool]]] = deque()
        self._wake: Callable[[], None] = lambda: None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=name)

    def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        return [self._presence(key.hex()) for key in keys]

    def _presence(self, name: str) -> Presence:
        if name in self._sizes:
            return Presence.YES
        return Presence.NOT_YET if name in self._coming and name not in self._removed else Presence.NO

    def submit_store(self, job_id: int, items: Sequence[StoreItem]) -> None:
        held: dict[str, bytes] = {}
        new: dict[str, StoreItem] = {}
        for item in items:
            name, nbytes = item.key.hex(), len(item.header) + item.payload.nbytes
            if name in self._sizes:
                held[name] = item.key
            elif name not in self._coming and self._make_room(nbytes, held):
                self._coming[name] = nbytes
                self._num_bytes += nbytes
                new[name] = item
        self._worker.submit(self._store, job_id, tuple(held.values()), new)

    def _make_room(self, nbytes: int, keep: Container[str]) -> bool:
        while self._num_bytes + nbytes > self._capacity_bytes:
            oldest = next((name for name in self._sizes if name not in keep), None)
            if oldest is None:
                return False
            self._forget(oldest)
        return True

    def _forget(self, name: str) -> None:
        self._num_bytes -= self._sizes.pop(name)
        self._worker.submit(self._objects.delete, name)

    def _store(self, job_id: int, held: tuple[bytes, ...], new: dict[str, StoreItem]) -> None:
        written = {name: self._put(name, item) for name, item in new.items()}
        stored = tuple(item.key for name, item in new.items() if written[name])
        self._end(JobDone(job_id, stored=held + stored), written)

    def _put(self, name: str, item: StoreItem) -> bool:
        try:
            self._objects.put(name, (item.header, item.payload))
        except OSError:
            return False
        return True

    def submit_load(self, job_id: int, items: Sequence[LoadItem]) -> None:
        known = {item.key: item for item in reversed(items) if item.key.hex() in self._sizes}
        self._worker.submit(self._load, job_id, list(known.values()))

    def _load(self, job_id: int, items: Sequence[LoadItem]) -> None:
        loaded = {}
        for item in items:
            try:
                data = self._objects.get(item.key.hex())
                header = data[: header_length(data)]
            except (OSError, CorruptRecord):
                continue
            if len(data) == len(header) + item.into.nbytes:
                item.into[:] = data[len(header) :]
                loaded[item.key] = header
        self._end(JobDone(job_id, loaded=loaded), {})

    def _end(self, done: JobDone, written: dict[str, bool]) -> None:
        self._ended.append((done, written))
        self._wake()

    def finished(self) -> list[JobDone]:
        jobs = []
        while self._ended:
            done, written = self._ended.popleft()
            gone = {name for name in written if name in self._removed}
            self._removed -= gone
            for name, ok in written.items():
                nbytes = self._coming.pop(name)
                if ok and name not in gone:
                    self._sizes[name] = nbytes
                else:
                    self._num_bytes -= nbytes
            jobs.append(replace(done, stored=tuple(key for key in done.stored if key.hex() not in gone)))
        return jobs

    def set_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def remove(self, keys: Sequence[bytes]) -> None:
        for name in [key.hex() for key in keys]:
            if name in self._sizes:
                self._forget(name)
            elif name in self._coming:
                self._removed.add(name)
                self._worker.submit(self._objects.delete, name)  # after it was put

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    @property
    def writable(self) -> bool:
        return True

    def close(self) -> None:
        self._worker.shutdown()
