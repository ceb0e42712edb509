"""Proof: a full disk fails no request, and the tier's counter is what lies in its directory, to the byte.

The disk is a small file system in memory in a mount namespace of its own, so that nobody else sees it; where
the system lets us make none, writes fail as a full disk's would.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from shared.clock import ManualClock
from tests.chaos.cluster import Cluster
from tests.chaos.handoff_base import (
    Book,
    Proof,
    Setting,
    Verdict,
    again,
    cluster_of,
    leaks,
    long_cases,
    said,
    total,
)
from tests.chaos.handoff_files import STORE_ONLY
from tests.chaos.handoff_patched import patched
from tests.contract.tiering.harness import Stored, make
from tests.unit.tiering.disk_setting import RECORD_BYTES, Disk, directory_bytes, file_of

#: Where the small file system is mounted, if it is; said to the process that does the proof.
MOUNT = "TRIPTYCH_CHAOS_MOUNT"
SIZE_MB = 3
NUM_OPERATIONS = 10_000
NUM_KEYS = 400
_MOUNTED = [
    "unshare",
    "-rm",
    "sh",
    "-c",
    'mount -t tmpfs -o size=$1m none "$2" && shift 2 && exec "$@"',
    "sh",
]


def in_small_disk(argv: list[str], mount: Path) -> tuple[list[str], dict[str, str]]:
    """``argv`` and environment, such that the process has the small file system at ``mount``; as they are
    where that cannot be."""
    mount.mkdir(parents=True, exist_ok=True)
    wrapped = [*_MOUNTED, str(SIZE_MB), str(mount)]
    try:
        probe = subprocess.run([*wrapped, "true"], capture_output=True, check=False)
    except OSError:
        return argv, dict(os.environ)
    if probe.returncode:
        return argv, dict(os.environ)
    return [*wrapped, *argv], {**os.environ, MOUNT: str(mount)}


async def prove(setting: Setting) -> list[Proof]:
    mount = os.environ.get(MOUNT, "")
    folder = Path(mount) if mount else setting.root
    how = f"a file system of {SIZE_MB} MB" if mount else "writes that fail (no private mounts here)"
    served = await _serving(setting, folder / "tier", how, bool(mount))
    counted = await asyncio.to_thread(_counter, setting, folder, how)
    return [served, counted]


async def _serving(setting: Setting, disk: Path, how: str, mounted: bool) -> Proof:
    settings = [*STORE_ONLY, f"kv_store:disk.path={disk}", "kv_store:disk.capacity_mb=64"]
    cases = long_cases(setting.seed)
    started = patched(**({"prefill": "always_load"} | ({} if mounted else {"kv_store": "fill_disk"})))
    async with cluster_of(setting, "full", "p=1,d=1,s=1", settings, as_spec=started) as (
        cluster,
        book,
    ):
        off = 0.0
        for _ in range(60):
            fresh = list(islice(cases, 24))
            for _ in range(2):
                await book.send([again(case, len(book.cases) + n) for n, case in enumerate(fresh)])
            off = await total(cluster, "kv_store", "triptych_kv_offload_disabled_total")
            if off:
                break
        # Full as it is, it goes on serving.
        await _use(cluster, book, list(islice(cases, 24)))
        failures = await total(
            cluster, "kv_store", "triptych_kv_offload_write_failures_total", tier="disk", error="ENOSPC"
        )
        loaded = await total(cluster, "kv_store", "triptych_kv_store_hits_total")
        used = directory_bytes(disk)
        rests = await cluster.at_rest(setting.lane.back_s)
        restarts, errors = sum(cluster.restarts().values()), cluster.logged_errors()
        verdict = await asyncio.to_thread(Verdict.of, book)
    passed = verdict.good and off > 0 and failures > 0 and not (restarts or errors or leaks(rests))
    figure = (
        f"{how}, {used >> 10} KiB of it used; writes off {off:.0f} times, {failures:.0f} x ENOSPC; "
        f"{verdict}, {loaded:.0f} blocks from the store{leaks(rests)}"
    )
    figure += said(errors)
    figures = {"failed": verdict.failed, "wrong": verdict.wrong, "used_bytes": used, "enospc": failures}
    main = (verdict.failed + verdict.wrong, f"failed or wrong of {verdict.requests}", 0)
    return Proof("disk full, serving", passed, figure, figures, main=main)


async def _use(cluster: Cluster, book: Book, cases: list) -> None:  # type: ignore[type-arg]
    for _ in range(3):
        await book.send([again(case, len(book.cases) + n) for n, case in enumerate(cases)])


class _Operations:
    """Random operations on a tier of ``num_records``, each on one record. ``counts``: how many of which."""

    def __init__(self, directory: Path, num_records: int, rng: random.Random) -> None:
        self._clock = ManualClock(1000.0)
        self._directory = directory
        self._num_records = num_records
        self._rng = rng
        self._records = [make(n) for n in range(NUM_KEYS)]
        self.disk = self._open()
        self.counts: dict[str, int] = {}
        self.worst = 0
        self.checks = 0
        self.off = 0
        self.enospc = 0

    def _open(self) -> Disk:
        return Disk(self._directory, self._num_records, "lru", self._clock)

    def run(self, count: int) -> None:
        ways: list[tuple[float, Callable[[list[Stored]], None]]] = [
            (0.45, self.store),
            (0.3, self.load),
            (0.1, self.remove),
            (0.1, self.spoil),
            (0.05, self.vanish),
        ]
        weights, calls = [w for w, _ in ways], [call for _, call in ways]
        while sum(self.counts.values()) < count:
            call = self._rng.choices(calls, weights)[0]
            chosen = self._rng.sample(self._records, self._rng.randint(1, 8))
            call(chosen)
            self.counts[call.__name__] = self.counts.get(call.__name__, 0) + len(chosen)
            self._clock.advance(0.2)
            if self._rng.random() < 0.05:
                self.compare()
            if self._rng.random() < 0.01:
                self.restart()
        self.compare()

    def store(self, records: list[Stored]) -> None:
        self.disk.store(records)

    def load(self, records: list[Stored]) -> None:
        self.disk.good(records)

    def remove(self, records: list[Stored]) -> None:
        self.disk.tier.remove([record.key for record in records])

    def spoil(self, records: list[Stored]) -> None:
        """One byte each, and the loads that find it."""
        for path in self._there(records):
            with path.open("r+b") as file:
                file.seek(self._rng.randrange(RECORD_BYTES))
                file.write(b"\xff" if self._rng.random() < 0.5 else b"\x01")
        self.disk.driver.load(records)

    def vanish(self, records: list[Stored]) -> None:
        """Somebody else removes files; a load, or the next inventory, notices."""
        for path in self._there(records):
            path.unlink(missing_ok=True)
        self.disk.driver.load(records)

    def _there(self, records: list[Stored]) -> list[Path]:
        """Their files, once nothing is on its way."""
        self.disk.driver.settle()
        return [path for record in records if (path := file_of(self._directory, record)).exists()]

    def compare(self) -> None:
        """Let it come to rest, and see how far the counter is off."""
        self.disk.tier._writers.drain()
        self.disk.driver.collect()
        self.disk.tier._writers.drain()
        self.worst = max(self.worst, abs(self.disk.tier.num_bytes - directory_bytes(self._directory)))
        self.checks += 1

    def restart(self) -> None:
        self.close()
        self.disk = self._open()

    def close(self) -> None:
        self.disk.close()
        self.off += self.disk.seen.events["disabled"]
        self.enospc += self.disk.seen.events["write_failed", "ENOSPC"]


def _counter(setting: Setting, folder: Path, how: str) -> Proof:
    """Half of the operations in a tier that has to evict, half in one that is larger than its disk."""
    rng = random.Random(f"{setting.seed}/counter")
    for path in (folder / "tier").glob("*/*"):
        path.unlink()
    small = _Operations(folder / "small", 60, rng)
    small.run(NUM_OPERATIONS // 2)
    small.close()
    large = _Operations(folder / "large", 100_000, rng)
    large.run(NUM_OPERATIONS - NUM_OPERATIONS // 2)
    large.close()
    operations = sum(small.counts.values()) + sum(large.counts.values())
    worst = max(small.worst, large.worst)
    evicted = sum(n for event, n in small.disk.seen.events.items() if event[:1] == ("evicted",))
    full = large.enospc > 0 or "fail" in how
    passed = worst == 0 and operations >= NUM_OPERATIONS and full and evicted > 0
    figure = (
        f"{operations} operations, {small.checks + large.checks} comparisons: counter off by {worst} bytes; "
        f"{large.enospc} x ENOSPC, writes off {large.off} times"
    )
    main = (worst, f"bytes off after {operations} operations", 0)
    return Proof("disk full, byte counter", passed, figure, large.counts, main=main)
