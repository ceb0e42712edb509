"""What a full tier gives up first: LRU, ARC and S3-FIFO by name; and what is let in: admission at second use.

Owns orders of opaque keys; not the records, their bytes, or when a tier is full. Every policy remembers
keys that are gone (ghosts), within a bound. Single-threaded. All operations are O(1) amortised, beside
one step for each key in use that a search for victims meets.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from shared.errors import ConfigError

K = TypeVar("K", bound=Hashable)


class _Look(enum.Enum):
    """A look at a key that did not evict it."""

    REFUSED = enum.auto()
    MOVED = enum.auto()


class EvictionPolicy(ABC, Generic[K]):
    """An order of the keys that are held.

    ``capacity`` is the number of keys that a tier holds when it is full. Where sizes differ it is an
    estimate: it bounds the ghosts and steers the balance, and nothing else hangs on it.

    Keys of one call stand in the order of their chain of blocks, parents first, and count as equally
    old; of these, later ones are evicted first, so that a prefix is eaten from its tail.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("capacity must be positive")
        self.capacity = capacity

    @abstractmethod
    def __len__(self) -> int:
        """Keys held."""

    @abstractmethod
    def stored(self, keys: Sequence[K]) -> None:
        """These keys are held from now on. One that is held already counts as touched."""

    @abstractmethod
    def touched(self, keys: Sequence[K]) -> None:
        """These keys were used. Keys that are not held are passed over."""

    @abstractmethod
    def followed(self, keys: Sequence[K]) -> None:
        """The chain that these keys are the beginning of grew by what was just stored: they are as old as
        that from now on, and go after it. That is no use of them. Keys that are not held are passed over."""

    @abstractmethod
    def removed(self, key: K) -> None:
        """A key is held no more for another reason than eviction; nothing of it is remembered."""

    def victims(self, can_evict: Callable[[K], bool]) -> Iterator[K]:
        """Evict key after key, each once, as long as the caller goes on. A key that ``can_evict`` refuses
        is in use: it becomes the newest of its queue. Nothing else may be called between two keys."""
        refused = 0
        while refused < len(self):
            key = self._next(can_evict, refused)
            if key is _Look.REFUSED:
                refused += 1
                continue
            refused = 0
            if key is not _Look.MOVED:
                yield key

    @abstractmethod
    def _next(self, can_evict: Callable[[K], bool], refused: int) -> K | _Look:
        """Look at one key: take it out and return it; or put it elsewhere and return REFUSED when it
        may not go, MOVED when it has used up one of finitely many chances. The last ``refused`` looks all
        ended in REFUSED; as many as there are keys must have met every key."""


class LRU(EvictionPolicy[K]):
    """The least recently used first."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._keys: OrderedDict[K, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def stored(self, keys: Sequence[K]) -> None:
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)

    def touched(self, keys: Sequence[K]) -> None:
        self.stored([key for key in keys if key in self._keys])

    def followed(self, keys: Sequence[K]) -> None:
        self.touched(keys)

    def removed(self, key: K) -> None:
        self._keys.pop(key, None)

    def _next(self, can_evict: Callable[[K], bool], refused: int) -> K | _Look:
        key = next(iter(self._keys))
        if not can_evict(key):
            self._keys.move_to_end(key)
            return _Look.REFUSED
        del self._keys[key]
        return key


class ARC(EvictionPolicy[K]):
    """Adaptive replacement: recent keys and frequent keys in two lists, whose balance follows the ghosts.

    After N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003. Two
    departures, since a tier asks for victims before it knows what it will store: a ghost that comes
    back moves the target when it is stored, after the eviction that made room for it; and of a tie
    (as many recent keys as the target) the frequent list gives.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._recent: OrderedDict[K, None] = OrderedDict()  # T1
        self._frequent: OrderedDict[K, None] = OrderedDict()  # T2
        self._recent_ghosts: OrderedDict[K, None] = OrderedDict()  # B1
        self._frequent_ghosts: OrderedDict[K, None] = OrderedDict()  # B2
        self._target = 0.0  # p: wanted length of T1

    def __len__(self) -> int:
        return len(self._recent) + len(self._frequent)

    def stored(self, keys: Sequence[K]) -> None:
        for key in reversed(keys):
            b1, b2 = len(self._recent_ghosts), len(self._frequent_ghosts)
            if key in self._recent or key in self._frequent:
                self.touched((key,))
            elif key in self._recent_ghosts:
                self._target = min(self._target + max(b2 / b1, 1.0), float(self.capacity))
                del self._recent_ghosts[key]
                self._frequent[key] = None
            elif key in self._frequent_ghosts:
                self._target = max(self._target - max(b1 / b2, 1.0), 0.0)
                del self._frequent_ghosts[key]
                self._frequent[key] = None
            else:
                self._recent[key] = None
            self._trim()

    def touched(self, keys: Sequence[K]) -> None:
        for key in reversed(keys):
            if key in self._recent:
                del self._recent[key]
                self._frequent[key] = None
            elif key in self._frequent:
                self._frequent.move_to_end(key)

    def followed(self, keys: Sequence[K]) -> None:
        for key in reversed(keys):
            queue = self._recent if key in self._recent else self._frequent
            if key in queue:
                queue.move_to_end(key)

    def removed(self, key: K) -> None:
        for queue in (self._recent, self._frequent, self._recent_ghosts, self._frequent_ghosts):
            queue.pop(key, None)

    def _next(self, can_evict: Callable[[K], bool], refused: int) -> K | _Look:
        ranked = [(self._recent, self._recent_ghosts), (self._frequent, self._frequent_ghosts)]
        if len(self._recent) <= self._target:
            ranked.reverse()
        queue, ghosts = ranked[0] if refused < len(ranked[0][0]) else ranked[1]
        key = next(iter(queue))
        if not can_evict(key):
            queue.move_to_end(key)
            return _Look.REFUSED
        del queue[key]
        ghosts[key] = None
        self._trim()
        return key

    def _trim(self) -> None:
        """At most ``capacity`` keys ever seen once are known, and twice as many in all."""
        b1, b2 = self._recent_ghosts, self._frequent_ghosts
        while b1 and len(self._recent) + len(b1) > self.capacity:
            b1.popitem(last=False)
        while b2 and len(self) + len(b1) + len(b2) > 2 * self.capacity:
            b2.popitem(last=False)


class S3FIFO(EvictionPolicy[K]):
    """Three queues: new keys pass a small one, what was used twice on the way goes on to the main one.

    After J. Yang, Y. Zhang, Z. Qiu, Y. Yue and R. Vigfusson, "FIFO queues are all you need for cache
    eviction", SOSP 2023: a small queue of 10 %, counters up to 3, ghosts as many as the main queue's keys.
    """

    MAX_COUNT = 3

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small_capacity = max(1, capacity // 10)
        self._max_ghosts = max(1, capacity - self._small_capacity)
        self._small: OrderedDict[K, int] = OrderedDict()  # key -> uses since it came here
        self._main: OrderedDict[K, int] = OrderedDict()
        self._ghosts: OrderedDict[K, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def stored(self, keys: Sequence[K]) -> None:
        for key in reversed(keys):
            if key in self._small or key in self._main:
                self.touched((key,))
            elif key in self._ghosts:
                del self._ghosts[key]
                self._main[key] = 0
            else:
                self._small[key] = 0

    def touched(self, keys: Sequence[K]) -> None:
        for key in keys:
            queue = self._small if key in self._small else self._main
            if key in queue:
                queue[key] = min(queue[key] + 1, self.MAX_COUNT)

    def followed(self, keys: Sequence[K]) -> None:
        for key in reversed(keys):
            queue = self._small if key in self._small else self._main
            if key in queue:
                queue.move_to_end(key)

    def removed(self, key: K) -> None:
        for queue in (self._small, self._main):
            queue.pop(key, None)
        self._ghosts.pop(key, None)

    def _next(self, can_evict: Callable[[K], bool], refused: int) -> K | _Look:
        from_small = len(self._small) >= self._small_capacity or not self._main
        if refused >= len(self._small if from_small else self._main):
            from_small = not from_small
        return self._next_small(can_evict) if from_small else self._next_main(can_evict)

    def _next_small(self, can_evict: Callable[[K], bool]) -> K | _Look:
        key, uses = self._small.popitem(last=False)
        if uses > 1:
            self._main[key] = 0
            return _Look.MOVED
        if not can_evict(key):
            self._small[key] = uses
            return _Look.REFUSED
        self._ghosts[key] = None
        if len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)
        return key

    def _next_main(self, can_evict: Callable[[K], bool]) -> K | _Look:
        key, uses = self._main.popitem(last=False)
        if uses:
            self._main[key] = uses - 1
            return _Look.MOVED
        if not can_evict(key):
            self._main[key] = 0
            return _Look.REFUSED
        return key


POLICIES: dict[str, type[EvictionPolicy[Any]]] = {"lru": LRU, "arc": ARC, "s3fifo": S3FIFO}


def make_policy(name: str, capacity: int) -> EvictionPolicy[Any]:
    """A policy by its name, for about ``capacity`` keys. Raises ConfigError on an unknown name."""
    if name not in POLICIES:
        raise ConfigError(f"unknown eviction policy {name!r}; known: {', '.join(sorted(POLICIES))}")
    return POLICIES[name](max(1, capacity))


class SecondUse(Generic[K]):
    """Admission at second use: what is seen once only never costs a write. Remembers the ``capacity`` keys
    seen last, so that two uses far apart do not count."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("capacity must be positive")
        self._capacity = capacity
        self._seen: OrderedDict[K, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def admits(self, keys: Iterable[K]) -> list[bool]:
        """For each key, whether it was seen before; all of them count as seen now."""
        answers = []
        for key in keys:
            answers.append(key in self._seen)
            self._seen[key] = None
            self._seen.move_to_end(key)
            if len(self._seen) > self._capacity:
                self._seen.popitem(last=False)
        return answers
