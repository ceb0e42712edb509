"""Proof: whoever dies at whichever named failpoint, no answer changes and nothing stays held.

Each process has a list of its points and dies at one after the other: what its next life is armed with is
written into its configuration while the present one runs. Rounds of requests go on until all lists are
through; between rounds everything has to be free again within the lease and two seconds.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from services.cli.topology import ProcessSpec
from shared.failpoints import NAMES
from shared.tiering.record import decode_header, header_length, verify_payload
from tests.chaos.cluster import POLL_S, Cluster
from tests.chaos.handoff_base import (
    CLOCK,
    Book,
    Lane,
    Proof,
    Setting,
    Verdict,
    again,
    cluster_of,
    leaks,
    long_cases,
    said,
)
from tests.chaos.handoff_files import LOADING
from tests.chaos.ledger import check_rest
from tests.chaos.records import Case
from tests.chaos.workload import Workload
from tests.unit.tiering.disk_setting import record_files

#: By process: its points, each with the range of hits at which it dies. One of each kind never does.
POINTS: dict[str, dict[str, tuple[int, int]]] = {
    "encoder-0": {"encode.commit": (1, 2)},
    "prefill-0": {
        "prefill.commit": (1, 6),
        "commit.after_checksum": (1, 6),
        "xfer.after_k": (1, 8),
    },
    "prefill-1": {
        "xfer.before_verified": (1, 2),
        "decode.after_emit": (1, 4),
        "free.before_release": (1, 4),
    },
    "decode-0": {"xfer.after_k": (1, 20), "commit.after_checksum": (1, 6)},
    "decode-1": {"xfer.before_verified": (1, 4), "decode.after_emit": (2, 60)},
    "kv-store-0": {
        "xfer.after_k": (1, 12),
        "store.before_publish": (1, 12),
        "tier.before_write": (1, 6),
        "tier.after_write": (1, 6),
    },
    "kv-store-1": {
        "xfer.before_verified": (1, 4),
        "tier.before_fsync": (1, 6),
        "tier.before_rename": (1, 6),
        "tier.after_rename": (1, 6),
    },
}
TOPOLOGY = "e=2,p=3,d=3,s=3"
SETTINGS = (
    "decode:kv.num_blocks=1024",
    # Prefixes come from the stores: so that prefill workers and disks have transfers too.
    "prefill:kv.prefix_caching=false",
)
NUM_MIXED, NUM_FRESH = 12, 10


async def prove(setting: Setting) -> list[Proof]:
    missing = NAMES - {point for points in POINTS.values() for point in points}
    if missing:
        return [Proof("kills", False, f"nobody dies at {', '.join(sorted(missing))}")]
    rng = random.Random(f"{setting.seed}/kills")
    lists = {name: _arms(points, setting.lane, rng) for name, points in POINTS.items()}
    first = {name: arms.pop(0) for name, arms in lists.items()}
    disks = {name: setting.root / name for name in lists if name.startswith("kv-store")}
    settings = [*SETTINGS, *(f"{name}:runtime.failpoints={arm}" for name, arm in first.items())]
    settings += [f"{name}:disk.path={path}" for name, path in disks.items()]
    async with cluster_of(setting, "kills", TOPOLOGY, settings, as_spec=LOADING) as (cluster, book):
        hangman = _Hangman(cluster, first, lists)
        slowest = await _rounds(setting, hangman, book)
        await cluster.until_whole()
        rests = await cluster.at_rest(setting.lane.back_s)
        errors = cluster.logged_errors()
        verdict = await asyncio.to_thread(Verdict.of, book)
    left = [problem for path in disks.values() for problem in _left_behind(path)]
    wanted = {(name, point): setting.lane.kills for name, points in POINTS.items() for point in points}
    short = {key: hangman.kills[key] for key in wanted if hangman.kills[key] < wanted[key]}
    good = verdict.good and not (short or left or errors or hangman.others or leaks(rests))
    passed = good and slowest <= setting.lane.back_s
    figure = (
        f"{hangman.kills.total()} kills at {len(NAMES)} points in {len(wanted)} places; {verdict}; "
        f"all back after {slowest:.1f} s at most; {len(left)} files left behind{leaks(rests)}"
    )
    figure += "".join(f"; {name} died at {point} only {n} times" for (name, point), n in short.items())
    figure += "".join(f"; {what}" for what in [*hangman.others, *left[:2]]) + said(errors)
    figures = {f"{name} {point}": n for (name, point), n in sorted(hangman.kills.items())}
    figures |= {"back_s": round(slowest, 2), "wrong": verdict.wrong, "failed": verdict.failed}
    main = (slowest, f"s until all blocks are back, after {hangman.kills.total()} kills", setting.lane.back_s)
    return [Proof("SIGKILL at each failpoint", passed, figure, figures, main=main)]


def _arms(points: dict[str, tuple[int, int]], lane: Lane, rng: random.Random) -> list[str]:
    """Each point as often as the lane says, in any order."""
    arms = [f"{point}=kill:{rng.randint(*hits)}" for point, hits in points.items() for _ in range(lane.kills)]
    rng.shuffle(arms)
    return arms


class _Hangman:
    """Knows what every life is armed with, and counts who died of it."""

    def __init__(self, cluster: Cluster, armed: dict[str, str], lists: dict[str, list[str]]) -> None:
        self.cluster = cluster
        self._specs = {spec.name: spec for spec in cluster.specs}
        self._armed = dict(armed)
        self._next = dict(armed)
        self._lists = lists
        #: Those whose next life's arm is in its place.
        self._written: set[str] = set()
        self._num_seen = 0
        self.kills: Counter[tuple[str, str]] = Counter()
        #: Deaths that were none of ours.
        self.others: list[str] = []

    @property
    def is_through(self) -> bool:
        """Every list is empty, and its last arm has struck."""
        return not any(self._lists.values()) and not any(self._armed.values())

    async def arm(self) -> None:
        """Wait until all are there; say what kills each next life."""
        await self.cluster.until_whole()
        self.bury()
        for name, arms in self._lists.items():
            if name not in self._written:
                self._written.add(name)
                self._next[name] = arms.pop(0) if arms else ""
                self.cluster.arm_next_life(self._spec(name), self._next[name])

    def bury(self) -> set[str]:
        """Take in who died; returns their names."""
        deaths = self.cluster.deaths[self._num_seen :]
        self._num_seen += len(deaths)
        for death in deaths:
            arm = self._armed.get(death.name, "")
            if death.code == -signal.SIGKILL and arm:
                self.kills[death.name, arm.partition("=")[0]] += 1
            else:
                self.others.append(f"{death.name} died of {death.code}")
            if death.name in self._next:
                self._armed[death.name] = self._next[death.name]
                self._written.discard(death.name)
        return {death.name for death in deaths}

    def _spec(self, name: str) -> ProcessSpec:
        return self._specs[name]


async def _rounds(setting: Setting, hangman: _Hangman, book: Book) -> float:
    """Requests until everybody has died of everything; returns the longest, in seconds, that survivors of a
    round held anything after its end, where that was waited for."""
    requests = _requests(setting.seed)
    most = 2 * max(len(points) for points in POINTS.values()) * setting.lane.kills
    slowest = 0.0
    for number in range(most):
        await hangman.arm()
        if hangman.is_through:
            break
        await book.send(next(requests), per_second=40)
        if number % setting.lane.rest_every == 0:
            slowest = max(slowest, await _until_back(setting.lane, hangman, book.ended_at))
    return slowest


async def _until_back(lane: Lane, hangman: _Hangman, since: float) -> float:
    """Seconds from the last ending, or the last death, until the survivors hold nothing."""
    dead: set[str] = set()
    while True:
        if died := hangman.bury():
            dead |= died
            since = max(since, *(death.at for death in hangman.cluster.deaths[-len(died) :]))
        rests = await hangman.cluster.at_rest(0.0, without=dead)
        held = [v for v in check_rest(rests) if "silent" not in v.detail]
        waited = CLOCK.now() - since
        if not held or waited > lane.back_s + 1.0:
            return waited
        await asyncio.sleep(POLL_S)


def _requests(seed: int) -> Iterator[list[Case]]:
    """Those of each round: requests of every sort, and texts of one round asked again in the next, so that
    stores are used a second time."""
    workload, numbers = Workload(seed, scale=0.5), itertools.count()
    texts = long_cases(seed)
    before: list[Case] = []
    for first in itertools.count(0, NUM_MIXED):
        fresh = list(itertools.islice(texts, NUM_FRESH))
        mixed = [workload.case(first + n) for n in range(NUM_MIXED)]
        yield [again(case, next(numbers)) for case in (*before, *mixed, *fresh)]
        before = fresh


def _left_behind(disk: Path) -> list[str]:
    """What lies in a tier's directory and is not a record as it should be."""
    found = [f"left: {path}" for folder in ("tmp", "quarantine") for path in disk.glob(f"{folder}/*")]
    for path in record_files(disk):
        data = path.read_bytes()
        try:
            record = decode_header(data[: header_length(data)])
            verify_payload(record, memoryview(data)[header_length(data) :])
            if record.key.hex() != path.name:
                raise ValueError("another record's name")
        except Exception as error:
            found.append(f"broken: {path}: {error}")
    return found
