"""What the proofs of the handoff share: how hard a run is, what a proof says, requests and their judgement.

Owns no fault and no process.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from services.cli.topology import Topology
from shared.clock import MonotonicClock
from tests.chaos import ledger
from tests.chaos.client import Client, Load
from tests.chaos.cluster import POLL_S, Cluster, running
from tests.chaos.expected import Answers
from tests.chaos.records import Case, Rest, Seen, Violation
from tests.chaos.workload import plain_case

CLOCK = MonotonicClock()
#: What is still held is back so long after the end of its lease.
SLACK_S = 2.0


class Lane(Struct, frozen=True):
    """How hard a run is. Seconds, and numbers of what is done. ``rest_every``: after every so many rounds of
    kills it is waited until nothing is held, which takes a lease where one was left behind."""

    name: str
    lease_s: float
    deadline_s: float
    partition_s: float
    kills: int
    rest_every: int
    freezes: int
    worker_restarts: int
    files: int
    frames: int
    timeout_s: float

    @property
    def back_s(self) -> float:
        """Within so long the blocks of whoever is gone have to be free again."""
        return self.lease_s + SLACK_S

    @property
    def settings(self) -> tuple[str, ...]:
        """For every process."""
        return f"transfer.lease_s={self.lease_s}", f"transfer.deadline_s={self.deadline_s}"


FAST = Lane(
    "fast",
    lease_s=1.0,
    deadline_s=1.0,
    partition_s=3.0,
    kills=3,
    rest_every=1,
    freezes=1,
    worker_restarts=6,
    files=7_000,
    frames=3_000,
    timeout_s=170.0,
)
LONG = Lane(
    "long",
    lease_s=30.0,
    deadline_s=5.0,
    partition_s=30.0,
    kills=20,
    rest_every=5,
    freezes=5,
    worker_restarts=50,
    files=20_000,
    frames=10_000,
    timeout_s=1500.0,
)


class Proof(Struct, frozen=True):
    """One line of the report. A control passes when the thing it spoils fails. ``main``: the one number of it
    that tables show, with its unit and what it may be at most."""

    name: str
    passed: bool
    figure: str
    figures: dict[str, Any] = {}
    control: bool = False
    main: tuple[float, str, float] | None = None


class Setting(Struct, frozen=True):
    """What a proof is given: all that it leaves lies under ``root``."""

    lane: Lane
    seed: int
    root: Path


class Book:
    """Requests to one cluster, and what came back; judged when all is over."""

    def __init__(self, cluster: Cluster) -> None:
        self._client = Client(cluster.http, CLOCK)
        self.cases: list[Case] = []
        self.seen: list[Seen] = []

    async def send(self, cases: Sequence[Case], *, per_second: float = 60.0, max_open: int = 0) -> list[Seen]:
        """Returns when all have ended, one way or another. ``max_open`` at a time; 0 = all."""
        load = Load(self._client, cases.__getitem__, per_second=per_second, max_open=max_open or len(cases))
        self.cases += cases
        try:
            await load.run(len(cases), lambda: True)
        finally:
            self.seen += load.seen
        return load.seen

    def violations(self) -> list[Violation]:
        """Against the oracle. Takes its time."""
        oracle = Answers()
        expected = {case.number: oracle.of(case) for case in self.cases}
        return ledger.check_requests(self.cases, expected, self.seen)

    @property
    def longest_s(self) -> float:
        """The longest that a client waited for its whole answer."""
        return max((seen.ended - seen.began for seen in self.seen), default=0.0)

    @property
    def ended_at(self) -> float:
        return max((seen.ended for seen in self.seen), default=CLOCK.now())


class Verdict(Struct, frozen=True):
    """Of the requests of a book. ``first``: what is wrong with the first that is."""

    requests: int
    wrong: int
    failed: int
    first: str

    @classmethod
    def of(cls, book: Book) -> Verdict:
        found = book.violations()
        failed = sum(v.rule == "ending" for v in found)
        first = f"; request {found[0].number}: {found[0].rule}: {found[0].detail}" if found else ""
        return cls(len(book.cases), len(found) - failed, failed, first)

    @property
    def good(self) -> bool:
        return not self.wrong and not self.failed

    def __str__(self) -> str:
        return f"{self.requests} requests, {self.failed} failed, {self.wrong} wrong{self.first}"


def plain_cases(seed: int, first: int = 0, *, max_tokens: int = 24) -> Iterator[Case]:
    """Without end, numbers from ``first`` on; no two have a prefix in common."""
    number = first
    while True:
        yield plain_case(seed, number, max_tokens=max_tokens)
        number += 1


def long_case(seed: int, number: int, length: int, *, max_tokens: int = 24) -> Case:
    """A prompt of so many tokens, more than 16, that has nothing in common with any other."""
    case = plain_case(seed, number, max_tokens=max_tokens)
    rng = random.Random(f"{seed}/long/{number}")
    words = f"{number:08d} " + "".join(rng.choices("abcdefghijklmnop ", k=length - 9))
    return structs.replace(case, body=case.body | {"prompt": words}, prompt=tuple(words.encode()))


def long_cases(seed: int, *, max_tokens: int = 24) -> Iterator[Case]:
    """Without end: prompts that cost more to compute in small steps than to load."""
    for number in itertools.count():
        yield long_case(seed, number, 300 + number % 100, max_tokens=max_tokens)


def again(case: Case, number: int) -> Case:
    """The same request under another number."""
    return structs.replace(case, number=number)


@asynccontextmanager
async def cluster_of(
    setting: Setting, name: str, topology: str, overrides: Sequence[str] = (), **more: Any
) -> AsyncIterator[tuple[Cluster, Book]]:
    """A deployment in a folder of this name, with the lane's settings."""
    shape = Topology.parse(topology, Topology(0, 0, 0, 0))
    settings = [*setting.lane.settings, *overrides]
    async with running(setting.root / name, shape, settings, **more) as cluster:
        yield cluster, Book(cluster)


async def total(cluster: Cluster, who: str, name: str, **labels: str) -> float:
    """A metric's sum over all processes of a kind ("" = any): of one sample each, or of all labels."""
    found = 0.0
    for spec in cluster.specs:
        if who in ("", spec.kind):
            samples = await cluster.metrics(spec)
            found += samples.value(name, **labels) if labels else samples.total(name)
    return found


async def until(condition: Callable[[], Any], patience_s: float, pause_s: float = POLL_S) -> float | None:
    """Seconds until the coroutine function answers true; None when it does not."""
    began = CLOCK.now()
    while not await condition():
        if CLOCK.now() - began > patience_s:
            return None
        await asyncio.sleep(pause_s)
    return CLOCK.now() - began


async def rest_after(
    cluster: Cluster, since: float, patience_s: float, without: Sequence[str] = ()
) -> tuple[float, list[Rest]]:
    """Seconds from ``since`` (of the clock) until nothing is held any more, and what is held then."""
    rests = await cluster.at_rest(patience_s, without=without)
    return CLOCK.now() - since, rests


def said(errors: Sequence[tuple[str, str]]) -> str:
    """What processes logged as errors, the first of it."""
    return "".join(f"; {name} logged: {what[:50]!r} .. {what[-40:]!r}" for name, what in errors[:2])


def leaks(rests: Sequence[Rest]) -> str:
    """What is held that should not be, in words."""
    return "".join(f"; {v.detail}" for v in ledger.check_rest(rests))
