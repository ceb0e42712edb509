"""What a disk tier holds: its records by key, in the order of the eviction policy.

Owns entries and their use; not the files behind them. Single-threaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from shared.clock import Clock
from shared.tiering.disk_files import occupied
from shared.tiering.eviction import EvictionPolicy
from shared.tiering.offload import TierObserver


@dataclass(slots=True, eq=False)
class Entry:
    """A record that is held. ``num_pins`` keep it from eviction; times are the clock's."""

    header_bytes: int
    payload_bytes: int
    stored_at: float
    used_at: float
    num_pins: int = 0

    @property
    def nbytes(self) -> int:
        """What its file counts."""
        return occupied(self.header_bytes + self.payload_bytes)


class DiskIndex:
    """Entries by key. A new entry cannot be evicted before ``enlist``, which the records of one job go
    through together, so that the policy sees them in the order of their chain."""

    def __init__(self, policy: EvictionPolicy[bytes], clock: Clock, observer: TierObserver) -> None:
        self._policy = policy
        self._clock = clock
        self._observer = observer
        self._entries: dict[bytes, Entry] = {}
        self._new: set[bytes] = set()
        #: What all files together count.
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __getitem__(self, key: bytes) -> Entry:
        return self._entries[key]

    def get(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    def copy(self) -> Mapping[bytes, Entry]:
        """The entries of now."""
        return self._entries.copy()

    def add(self, key: bytes, header_bytes: int, payload_bytes: int, idle_s: float = 0.0) -> None:
        """Hold a record, last used so long ago."""
        used_at = self._clock.now() - idle_s
        entry = self._entries[key] = Entry(header_bytes, payload_bytes, used_at, used_at)
        self._new.add(key)
        self.held_bytes += entry.nbytes

    def enlist(self, keys: Sequence[bytes]) -> None:
        """Those of ``keys`` (in the order of their chain) that are new can be evicted from now on."""
        new = [key for key in keys if key in self._new]
        self._new.difference_update(new)
        self._policy.stored(new)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Those of ``keys`` that are held were used, in the order of their chain."""
        held = [key for key in keys if key in self._entries]
        self._policy.touched(held)
        for key in held:
            self._entries[key].used_at = self._clock.now()

    @contextmanager
    def pinned(self, keys: Iterable[bytes]) -> Iterator[None]:
        """Meanwhile, those of ``keys`` that are held cannot be evicted."""
        entries = [entry for key in keys if (entry := self._entries.get(key))]
        for entry in entries:
            entry.num_pins += 1
        yield
        for entry in entries:
            entry.num_pins -= 1

    def pop(self, key: bytes, reason: str) -> Entry:
        """Hold a record no more, for another reason than room."""
        self._policy.removed(key)
        self._new.discard(key)
        return self._take(key, reason)

    def evict(self, is_short: Callable[[], bool]) -> Iterator[tuple[bytes, Entry]]:
        """Give records up while ``is_short`` says so and some can go; it is asked before each."""
        victims = self._policy.victims(self._is_idle)
        while is_short() and (key := next(victims, None)) is not None:
            yield key, self._take(key, "capacity")

    def _is_idle(self, key: bytes) -> bool:
        return not self._entries[key].num_pins

    def _take(self, key: bytes, reason: str) -> Entry:
        entry = self._entries.pop(key)
        self.held_bytes -= entry.nbytes
        now = self._clock.now()
        self._observer.evicted(reason, entry.nbytes, now - entry.stored_at, now - entry.used_at)
        return entry
