"""Lower tiers that a test drives by hand: a reactor whose calls run when told to, a tier kept in a dict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shared.clock import ManualClock
from shared.tiering.lower import LowerTiers, lower_tiers
from shared.tiering.offload import JobDone, LoadItem, OffloadTier, Presence, StoreItem


class ManualReactor:
    """``elsewhere`` and ``post`` run at ``run``; ``later`` once the clock has passed, too."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._calls: list[Callable[[], None]] = []
        self._later: list[tuple[float, Callable[[], None]]] = []

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        self._later.append((self._clock.now() + delay_s, call))

    def elsewhere(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self._calls.append(lambda: done(work()))

    def post(self, call: Callable[[], None]) -> None:
        self._calls.append(call)

    def run(self) -> None:
        """Everything that is due, and what follows from it."""
        due = [call for at, call in self._later if at <= self._clock.now()]
        self._later = [(at, call) for at, call in self._later if at > self._clock.now()]
        self._calls += due
        while self._calls:
            self._calls.pop(0)()


class DictTier(OffloadTier):
    """Records in a dict. Jobs end at once, or when ``release`` is called while ``held`` is set. What is in
    ``corrupt`` is found to be so when it is loaded."""

    def __init__(self, name: str = "disk") -> None:
        self.name = name
        self.records: dict[bytes, tuple[bytes, bytes]] = {}
        self.asked: list[bytes] = []
        self.unsure: set[bytes] = set()
        self.corrupt: set[bytes] = set()
        self.held = False
        self.open = True
        self._waiting: list[tuple[int, Callable[[], JobDone]]] = []
        self._done: list[JobDone] = []
        self._wake: Callable[[], None] = lambda: None
        self.num_loaded = self.num_stored = 0

    def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        self.asked += keys
        yes, no = Presence.YES, Presence.NO
        return [
            Presence.NOT_YET if key in self.unsure else yes if key in self.records else no for key in keys
        ]

    def submit_store(self, job_id: int, items: Sequence[StoreItem]) -> None:
        def run() -> JobDone:
            for item in items:
                self.records.setdefault(item.key, (item.header, bytes(item.payload)))
            self.num_stored += len(items)
            return JobDone(job_id, stored=tuple(item.key for item in items))

        self._begin(job_id, run)

    def submit_load(self, job_id: int, items: Sequence[LoadItem]) -> None:
        def run() -> JobDone:
            loaded = {}
            corrupt = self.corrupt.intersection(item.key for item in items)
            self.remove(list(corrupt))
            for item in items:
                header, payload = self.records.get(item.key, (b"", b""))
                if len(payload) == item.into.nbytes:
                    item.into[:] = payload
                    loaded[item.key] = header
            self.num_loaded += len(loaded)
            return JobDone(job_id, loaded=loaded, corrupt=corrupt)

        self._begin(job_id, run)

    def _begin(self, job_id: int, run: Callable[[], JobDone]) -> None:
        self._waiting.append((job_id, run))
        if not self.held:
            self.release()

    def release(self) -> None:
        """End every job under way."""
        waiting, self._waiting = self._waiting, []
        self._done += [run() for _, run in waiting]
        self._wake()

    def finished(self) -> list[JobDone]:
        done, self._done = self._done, []
        return done

    def set_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.records.pop(key, None)

    @property
    def num_bytes(self) -> int:
        return sum(len(header) + len(payload) for header, payload in self.records.values())

    @property
    def capacity_bytes(self) -> int:
        return 1 << 40

    @property
    def writable(self) -> bool:
        return self.open

    def close(self) -> None:
        self.release()


def below(
    clock: ManualClock, *tiers: OffloadTier, max_loads: int = 100, max_stores: int = 100
) -> tuple[LowerTiers, ManualReactor]:
    """Lower tiers with a deadline of one second, and what drives them."""
    reactor = ManualReactor(clock)
    made = lower_tiers(
        tiers,
        reactor,
        clock,
        deadline_s=1.0,
        max_loads=max_loads,
        max_stores=max_stores,
        num_remembered=1000,
    )
    return made, reactor
