"""A lower tier over Mooncake's distributed store: records in the memory of other hosts, shared by all stores.

Owns which records are there, as far as this store knows, and its share of the room; not the library, which
runs in a process of its own (``mooncake_link``). In the configuration:
``shared.tiering.mooncake:MooncakeTier?master=10.0.0.1:50051&capacity_mb=65536``.

The tables belong to the caller's thread. One worker thread makes the calls, in the order in which they were
asked for, copies between the caller's memory and the stage, and hands back what came of them.
"""

from __future__ import annotations

import importlib.util
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from shared.clock import Clock, MonotonicClock
from shared.errors import ConfigError
from shared.telemetry.logs import get_logger
from shared.tiering.mooncake_link import MooncakeLink, Unavailable
from shared.tiering.mooncake_process import Exist, Get, Put, Remove, Setup
from shared.tiering.observe import TierMetrics
from shared.tiering.offload import JobDone, LoadItem, OffloadTier, Presence, StoreItem
from shared.tiering.record import ALIGNMENT, CorruptRecord, header_length

_log = get_logger(__name__)
T = TypeVar("T")

#: Room in the stage for a header whose length is not known; longer ones are not found.
_HEADER_BYTES = 16 * ALIGNMENT
#: The library's word for a place that is too short for an object.
_TOO_SHORT = -600
#: How long an answer about a record of others, or of none, is good, and how many are remembered.
_ANSWER_S = 1.0
_MAX_ANSWERS = 1 << 16


@dataclass(slots=True)
class _Held:
    """A record that this store put there."""

    nbytes: int
    stored_at: float
    used_at: float


@dataclass
class _Ended:
    """What came of one piece of work. ``written``: bytes of each record that was to be stored, and whether it
    is there. ``gone``: not there, or broken. ``answers``: whether it is there."""

    job: JobDone | None = None
    written: dict[bytes, tuple[int, bool]] = field(default_factory=dict)
    loaded: dict[bytes, int] = field(default_factory=dict)
    gone: list[bytes] = field(default_factory=list)
    answers: dict[bytes, bool | None] = field(default_factory=dict)
    seconds: float = 0.0


class MooncakeTier(OffloadTier):
    """See OffloadTier. A record that this store did not put there is asked after in the background.

    ``capacity_mb`` bounds what this store puts there; Mooncake may give up records before. ``segment_mb`` of
    this host's memory are given to Mooncake, 0: others keep everything. ``prefix`` stands before the names of
    objects. A master that does not answer makes everything a miss and nothing is stored, for 1 s, then for
    twice as long each time, at most 60 s; each such pause counts as ``disabled``. Raises ConfigError when
    Mooncake is not installed.
    """

    def __init__(
        self,
        master: str,
        capacity_mb: int,
        *,
        metadata: str = "P2PHANDSHAKE",
        host: str = "127.0.0.1",
        segment_mb: int = 0,
        stage_mb: int = 64,
        protocol: str = "tcp",
        devices: str = "",
        prefix: str = "",
        name: str = "mooncake",
        clock: Clock | None = None,
    ) -> None:
        if importlib.util.find_spec("mooncake") is None:
            raise ConfigError("mooncake is not installed (the extra 'mooncake')")
        self.name = name
        self._prefix = prefix
        self._capacity_bytes = capacity_mb << 20
        self._clock = clock or MonotonicClock()
        self._observer = TierMetrics(name)
        self._held: OrderedDict[bytes, _Held] = OrderedDict()  # what is used least in front
        self._coming: dict[bytes, int] = {}
        self._removed: set[bytes] = set()
        self._asking: set[bytes] = set()
        self._answers: OrderedDict[bytes, tuple[bool, float]] = OrderedDict()
        self._num_bytes = 0
        self._num_pauses = 0
        self._ended: deque[_Ended] = deque()
        self._wake: Callable[[], None] = lambda: None
        setup = Setup(master, metadata, host, protocol, devices, segment_mb << 20)
        self._link = MooncakeLink(setup, stage_mb << 20, self._clock)
        self._stage_bytes = stage_mb << 20
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._do(_Ended(), partial(self._exist, ()))  # so that the process is there before the first look-up

    def _do(self, otherwise: _Ended, work: Callable[[], _Ended]) -> None:
        """In the worker; what comes of it is ``otherwise`` when it does not work at all."""

        def run() -> None:
            try:
                ended = work()
            except Unavailable:
                ended = otherwise
            except Exception as error:  # lost work would be a job that never ends
                _log.error("work for mooncake failed", error=repr(error))
                ended = otherwise
            self._ended.append(ended)
            self._wake()

        self._worker.submit(run)

    # Looking up.

    def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        now, answers_soon = self._clock.now(), self._link.answers
        answers = [self._presence(key, now) for key in keys]
        unknown = [key for key, answer in zip(keys, answers, strict=True) if answer is None]
        if answers_soon or not (self._asking or self._link.paused):  # a try is what ends a silence
            self._ask(unknown if answers_soon else keys[:1])
        if not answers_soon:  # nobody shall wait for that
            return [Presence.NO] * len(keys)
        return [answer or Presence.NOT_YET for answer in answers]

    def _ask(self, keys: Sequence[bytes]) -> None:
        if new := [key for key in dict.fromkeys(keys) if key not in self._asking]:
            self._asking.update(new)
            self._do(_Ended(answers=dict.fromkeys(new)), partial(self._exist, new))

    def _presence(self, key: bytes, now: float) -> Presence | None:
        """None: to be asked."""
        if key in self._held:
            return Presence.YES
        if key in self._coming:
            return Presence.NO if key in self._removed else Presence.NOT_YET
        there, until = self._answers.get(key, (False, now))
        if until <= now:
            return None
        return Presence.YES if there else Presence.NO

    def _exist(self, keys: Sequence[bytes]) -> _Ended:
        codes = self._link.call(Exist(self._names(keys)))
        return _Ended(answers={key: code == 1 for key, code in zip(keys, codes, strict=True)})

    def _know(self, key: bytes, there: bool) -> None:
        self._answers.pop(key, None)
        self._answers[key] = there, self._clock.now() + _ANSWER_S
        if len(self._answers) > _MAX_ANSWERS:
            self._answers.popitem(last=False)

    def _names(self, keys: Iterable[bytes]) -> list[str]:
        return [self._prefix + key.hex() for key in keys]

    # Storing.

    def submit_store(self, job_id: int, items: Sequence[StoreItem]) -> None:
        held: dict[bytes, None] = {}
        new: dict[bytes, StoreItem] = {}
        for item in items:
            nbytes = len(item.header) + item.payload.nbytes
            if item.key in self._held:
                held[item.key] = None
            elif item.key not in self._coming and self._make_room(nbytes, held):
                self._coming[item.key] = nbytes
                self._num_bytes += nbytes
                new[item.key] = item
        self._use(list(held))
        job = JobDone(job_id, stored=tuple(held))
        refused = {key: (self._coming[key], False) for key in new}
        self._do(_Ended(job, written=refused), partial(self._store, job, list(new.values())))

    def _make_room(self, nbytes: int, keep: dict[bytes, None]) -> bool:
        if nbytes > self._stage_bytes or self._link.paused:
            return False
        while self._num_bytes + nbytes > self._capacity_bytes:
            oldest = next((key for key in self._held if key not in keep), None)
            if oldest is None:
                return False
            self._forget(oldest, "capacity")
            self._do(_Ended(), partial(self._remove, (oldest,)))
        return True

    def _use(self, keys: Sequence[bytes]) -> None:
        """Consecutive blocks were used: the last of them goes first."""
        now = self._clock.now()
        for key in reversed(keys):
            if held := self._held.get(key):
                held.used_at = now
                self._held.move_to_end(key)

    def _forget(self, key: bytes, reason: str) -> None:
        if held := self._held.pop(key, None):
            now = self._clock.now()
            self._num_bytes -= held.nbytes
            self._observer.evicted(reason, held.nbytes, now - held.stored_at, now - held.used_at)

    def _store(self, job: JobDone, items: Sequence[StoreItem]) -> _Ended:
        began, ended = self._clock.now(), _Ended(job)
        for batch, places in self._batches(items, [len(i.header) + i.payload.nbytes for i in items]):
            for item, (at, nbytes) in zip(batch, places, strict=True):
                self._link.stage[at : at + len(item.header)] = item.header
                self._link.stage[at + len(item.header) : at + nbytes] = item.payload.cast("B")
            try:
                codes = self._link.call(Put(self._names(item.key for item in batch), places))
            except Unavailable:
                codes = [-1] * len(batch)
            for item, (_, nbytes), code in zip(batch, places, codes, strict=True):
                ended.written[item.key] = nbytes, code == 0
        stored = tuple(key for key, (_, ok) in ended.written.items() if ok)
        return replace(ended, job=replace(job, stored=job.stored + stored), seconds=self._clock.now() - began)

    def _batches(
        self, items: Sequence[T], sizes: Sequence[int]
    ) -> Iterator[tuple[list[T], list[tuple[int, int]]]]:
        """As many at a time as the stage takes, each with its place; what does not fit at all is left out."""
        batch: list[T] = []
        places: list[tuple[int, int]] = []
        at = 0
        for item, nbytes in zip(items, sizes, strict=True):
            if batch and at + nbytes > self._stage_bytes:
                yield batch, places
                batch, places, at = [], [], 0
            if nbytes <= self._stage_bytes:
                batch.append(item)
                places.append((at, nbytes))
                at += -(-nbytes // ALIGNMENT) * ALIGNMENT
        if batch:
            yield batch, places

    # Loading.

    def submit_load(self, job_id: int, items: Sequence[LoadItem]) -> None:
        wanted = {item.key: item for item in reversed(items)}
        items = list(reversed(wanted.values()))
        self._do(_Ended(JobDone(job_id)), partial(self._load, job_id, items))

    def _load(self, job_id: int, items: Sequence[LoadItem]) -> _Ended:
        began, loaded = self._clock.now(), dict[bytes, bytes]()
        gone: list[bytes] = []
        corrupt: list[bytes] = []
        for batch, places in self._batches(items, [_HEADER_BYTES + item.into.nbytes for item in items]):
            try:
                codes = self._link.call(Get(self._names(item.key for item in batch), places))
            except Unavailable:
                break
            broken: list[bytes] = []
            for item, (at, _), code in zip(batch, places, codes, strict=True):
                try:
                    self._take(item, self._link.stage[at : at + max(code, 0)], loaded)
                except CorruptRecord:
                    broken.append(item.key)
                if code < 0 and code != _TOO_SHORT:
                    gone.append(item.key)
            if broken:  # else it would be taken for stored
                gone += broken
                corrupt += broken
                self._remove(broken)
        sizes = {item.key: item.into.nbytes for item in items if item.key in loaded}
        seconds = self._clock.now() - began
        return _Ended(
            JobDone(job_id, loaded=loaded, corrupt=corrupt), loaded=sizes, gone=gone, seconds=seconds
        )

    @staticmethod
    def _take(item: LoadItem, data: memoryview, loaded: dict[bytes, bytes]) -> None:
        """Raises CorruptRecord for what does not begin as a record does."""
        if not data:
            return
        end = header_length(data)
        if len(data) == end + item.into.nbytes:
            item.into.cast("B")[:] = data[end:]
            loaded[item.key] = bytes(data[:end])

    # Ends.

    def finished(self) -> list[JobDone]:
        jobs = []
        while self._ended:
            ended = self._ended.popleft()
            self._take_in(ended)
            if ended.job is not None:
                removed = {key for key in ended.written if key in self._removed}
                self._removed -= removed
                stored = tuple(key for key in ended.job.stored if key not in removed)
                jobs.append(replace(ended.job, stored=stored))
        for _ in range(self._link.num_pauses - self._num_pauses):
            self._num_pauses += 1
            self._observer.disabled()
        return jobs

    def _take_in(self, ended: _Ended) -> None:
        now = self._clock.now()
        for key, (nbytes, ok) in reversed(ended.written.items()):
            del self._coming[key]
            if ok and key not in self._removed:
                self._held[key] = _Held(nbytes, now, now)
                self._observer.stored(nbytes, ended.seconds / len(ended.written))
                continue
            self._num_bytes -= nbytes
            if not ok:
                self._observer.write_failed("other")
        self._use(list(ended.loaded))
        for nbytes in ended.loaded.values():
            self._observer.loaded(nbytes, ended.seconds / len(ended.loaded))
        for key in ended.gone:
            self._forget(key, "missing")
            self._know(key, False)
        for key, there in ended.answers.items():
            self._asking.discard(key)
            if there is not None:
                self._know(key, there)

    def set_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._forget(key, "removed")
            self._know(key, False)
            if key in self._coming:
                self._removed.add(key)
        self._do(_Ended(), partial(self._remove, tuple(keys)))

    def _remove(self, keys: Sequence[bytes]) -> _Ended:
        # What is left there when this fails goes when Mooncake wants its room.
        self._link.call(Remove(self._names(keys)))
        return _Ended()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    @property
    def writable(self) -> bool:
        return not self._link.paused

    def close(self) -> None:
        self._worker.shutdown()
        self._link.close()
