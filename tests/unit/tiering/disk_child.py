"""A process with a disk tier, to be killed or starved: kill DIR FAILPOINTS | fill DIR | hold DIR."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.contract.tiering.harness import make, make_all
from tests.unit.tiering.disk_setting import Disk, directory_bytes


def kill(directory: Path, failpoints: str) -> None:
    """Store 20 records in jobs of five; say how many were acknowledged after each."""
    disk = Disk(directory, 8, failpoints=failpoints, num_writers=1)
    for n in range(0, 20, 5):
        disk.store(make_all(range(n, n + 5)))
        print(n + 5, flush=True)


def fill(directory: Path) -> None:
    """Store more than the file system has room for; say how many are held, and whether writes are off."""
    disk = Disk(directory, 1000)
    records = make_all(range(60))
    stored = disk.store(records)
    off = int(not disk.tier.writable)
    if disk.good(records) != stored or disk.tier.num_bytes != directory_bytes(directory):
        raise SystemExit("what is held is not what was stored")
    disk.check()
    print(len(stored), len(records), off)


def hold(directory: Path) -> None:
    """Hold the directory until the end of stdin."""
    disk = Disk(directory)
    disk.store([make(0)])
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    {"kill": kill, "fill": fill, "hold": hold}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])  # type: ignore[operator]
