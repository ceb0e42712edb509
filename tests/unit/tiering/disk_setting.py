"""What tests of the disk tier share: a tier over a directory, what it reported, what lies on disk."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shared.clock import Clock, ManualClock
from shared.failpoints import Failpoints
from shared.tiering.disk import DiskTier
from shared.tiering.eviction import make_policy
from shared.tiering.offload import TierObserver
from tests.contract.tiering.harness import Driver, Stored

#: What one record of the harness counts: a page of header, two of payload.
RECORD_BYTES = 12288


class Observed(TierObserver):
    """Counts what a tier reports: (event, label) and byte sums by event."""

    def __init__(self) -> None:
        self.events: Counter[Any] = Counter()
        self.idle: list[float] = []
        self.errors: list[int] = []

    def stored(self, nbytes: int, seconds: float) -> None:
        self.events["stored"] += 1

    def loaded(self, nbytes: int, seconds: float) -> None:
        self.events["loaded"] += 1

    def evicted(self, reason: str, nbytes: int, age_s: float, idle_s: float) -> None:
        assert nbytes and age_s >= idle_s >= 0
        self.events["evicted", reason] += 1
        self.idle.append(idle_s)

    def quarantined(self, reason: str) -> None:
        self.events["quarantined", reason] += 1

    def write_failed(self, error: str) -> None:
        self.events["write_failed", error] += 1

    def disabled(self) -> None:
        self.events["disabled"] += 1

    def reconciled(self, error_bytes: int) -> None:
        self.errors.append(error_bytes)


class Disk:
    """A disk tier with room for ``num_records`` records, its driver and its observer."""

    def __init__(
        self,
        directory: Path,
        num_records: float = 100,
        policy: str = "lru",
        clock: Clock | None = None,
        failpoints: str = "",
        **options: Any,
    ) -> None:
        self.directory = directory
        self.seen = Observed()
        self.tier = DiskTier(
            directory,
            int(num_records * RECORD_BYTES),
            make_policy(policy, int(num_records)),
            clock=clock or ManualClock(1000.0),
            failpoints=Failpoints.parse(failpoints),
            observer=self.seen,
            **options,
        )
        self.driver = Driver(self.tier)
        self.store, self.good, self.present = self.driver.store, self.driver.good, self.driver.present

    def close(self) -> None:
        self.tier.close()
        self.driver.collect()

    def check(self) -> None:
        """Let it come to rest: the counter is what lies in the directory, and nothing is half done."""
        self.close()
        assert self.tier.num_bytes == directory_bytes(self.directory) <= self.tier.capacity_bytes
        assert os.listdir(self.directory / "tmp") == []
        assert self.tier.num_records == len(record_files(self.directory))


def record_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("[0-9a-f][0-9a-f]/*"))


def file_of(directory: Path, stored: Stored) -> Path:
    name = stored.key.hex()
    return directory / name[:2] / name


def quarantined(directory: Path) -> list[str]:
    return sorted(os.listdir(directory / "quarantine"))


def directory_bytes(directory: Path) -> int:
    """Whole pages of every file but the lock."""
    paths: Iterable[Path] = (path for path in directory.glob("*/*"))
    return sum(-(-path.lstat().st_size // 4096) * 4096 for path in paths)
