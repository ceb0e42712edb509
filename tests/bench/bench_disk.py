"""The disk tier beside a plain loop of the same system calls, in turns in one run. One JSON line.

python tests/bench/bench_disk.py [DIR] [--records 64] [--reps 5] [--restart 10000]

DIR must lie on a disk. Both sides move the same records from and to the same page-aligned memory, header and
payload in one call, one file a record, in the order of the memory (sequential) or shuffled (scattered). A
store ends when everything is durable: each file and the folder. Before a load the page cache is dropped. The
plain loop runs buffered and with direct I/O; the tier is compared with whichever is faster.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from shared.clock import MonotonicClock
from shared.failpoints import Failpoints
from shared.kernels.checksum import head_checksums
from shared.tiering.disk import DiskTier
from shared.tiering.eviction import make_policy
from shared.tiering.offload import LoadItem, StoreItem
from shared.tiering.record import ALIGNMENT, KvRecord, Record, encode_header
from shared.types.identity import IdentityKey, LayoutSpec
from shared.types.kv import KVGroupSpec

IDENTITY = IdentityKey("bench", "1", "bench", "any")
#: Blocks of 16 tokens of 30 layers with 3 heads of 64: 368,640 and 737,280 bytes.
LAYOUTS = tuple(LayoutSpec((KVGroupSpec(30, 3, 64, dtype),), 16) for dtype in ("bfloat16", "float32"))
SMALL = LayoutSpec((KVGroupSpec(1, 2, 32, "float32"),), 16)
FLAGS = {"buffered": 0, "direct": os.O_DIRECT}


def memory(num_records: int, nbytes: int) -> list[memoryview]:
    """Page-aligned records of different random bytes."""
    whole = memoryview(mmap.mmap(-1, num_records * nbytes))
    records = [whole[n * nbytes : (n + 1) * nbytes] for n in range(num_records)]
    for record in records:
        record[:] = random.randbytes(nbytes)
    return records


def items_of(layout: LayoutSpec, records: Sequence[memoryview], salt: int) -> list[StoreItem]:
    """One record each, with a key that no other salt gives."""
    items = []
    for n, payload in enumerate(records):
        content = KvRecord(0, b"%d/%d" % (salt, n), b"parent", tuple(range(layout.block_size)))
        sums = head_checksums(payload, layout.groups[0].num_kv_heads)
        record = Record(IDENTITY, layout, content, sums, payload.nbytes)
        items.append(StoreItem(record.key, encode_header(record), payload))
    return items


class Plain:
    """A loop of pwritev and fsync, or of preadv, over files in one folder."""

    def __init__(self, folder: Path, flags: int) -> None:
        folder.mkdir()
        self._folder = folder
        self._flags = flags
        self._header = memoryview(mmap.mmap(-1, ALIGNMENT))

    def store(self, items: Sequence[StoreItem]) -> None:
        for item in items:
            self._header[:] = item.header
            path = self._folder / item.key.hex()
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._flags, 0o600)
            if os.pwritev(fd, (self._header, item.payload), 0) != ALIGNMENT + item.payload.nbytes:
                raise OSError("a short write")
            os.fsync(fd)
            os.close(fd)
        fd = os.open(self._folder, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    def load(self, items: Sequence[LoadItem]) -> None:
        for item in items:
            fd = os.open(self._folder / item.key.hex(), os.O_RDONLY | self._flags)
            if os.preadv(fd, (self._header, item.into), 0) != ALIGNMENT + item.into.nbytes:
                raise OSError("a short read")
            os.close(fd)

    def close(self) -> None:
        shutil.rmtree(self._folder)


class Tier:
    """The disk tier, one job at a time."""

    def __init__(self, folder: Path, capacity_bytes: int) -> None:
        policy = make_policy("lru", 1 << 20)
        clock, failpoints = MonotonicClock(), Failpoints()
        began = time.perf_counter()
        self.tier = DiskTier(folder, capacity_bytes, policy, clock=clock, failpoints=failpoints)
        self.start_s = time.perf_counter() - began
        self._folder = folder
        self._news = threading.Event()
        self._job = 0
        self.tier.set_wake(self._news.set)

    def store(self, items: Sequence[StoreItem]) -> None:
        self._job += 1
        self.tier.submit_store(self._job, items)
        if self._wait() != len(items):
            raise OSError("not everything was stored")

    def load(self, items: Sequence[LoadItem]) -> None:
        self._job += 1
        self.tier.submit_load(self._job, items)
        if self._wait() != len(items):
            raise OSError("not everything was loaded")

    def _wait(self) -> int:
        while True:
            self._news.wait()
            self._news.clear()
            for done in self.tier.finished():
                return len(done.stored) + len(done.loaded)

    def close(self) -> None:
        self.tier.close()
        shutil.rmtree(self._folder)


def drop_cache(folder: Path) -> None:
    """Let go of the cached pages of every file below."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def row(nbytes: int, times: dict[str, list[float]]) -> dict[str, float]:
    """Medians in GB/s, and the tier's against the faster plain loop's."""
    rates = {name: nbytes / statistics.median(taken) / 1e9 for name, taken in times.items()}
    ratio = rates["tier"] / max(rate for name, rate in rates.items() if name != "tier")
    return {**{f"{name}_gb_s": round(rate, 3) for name, rate in rates.items()}, "ratio": round(ratio, 3)}


def measure_layout(folder: Path, layout: LayoutSpec, num_records: int, reps: int) -> dict[str, Any]:
    nbytes = layout.groups[0].extent_bytes(layout.block_size)
    records, landing = memory(num_records, nbytes), memory(num_records, nbytes)
    total = num_records * (nbytes + ALIGNMENT)
    sides: dict[str, Any] = {name: Plain(folder / name, flags) for name, flags in FLAGS.items()}
    sides["tier"] = Tier(folder / "tier", 4 * (reps + 1) * total)
    times: dict[str, dict[str, list[float]]] = {
        f"{action}_{order}": {name: [] for name in sides}
        for action in ("store", "load")
        for order in ("sequential", "scattered")
    }
    for rep in range(reps + 1):
        for order in ("sequential", "scattered"):
            items = items_of(layout, records, 2 * rep + (order == "scattered"))
            if order == "scattered":
                random.shuffle(items)
            for name in random.sample(list(sides), len(sides)):
                times[f"store_{order}"][name].append(seconds(lambda s=sides[name], i=items: s.store(i)))
            wanted = [LoadItem(item.key, into) for item, into in zip(items, landing, strict=True)]
            drop_cache(folder)
            for name in random.sample(list(sides), len(sides)):
                for one in landing:
                    one[:] = bytes(nbytes)
                times[f"load_{order}"][name].append(seconds(lambda s=sides[name], w=wanted: s.load(w)))
                if any(i.payload != into for i, into in zip(items, landing, strict=True)):
                    raise OSError("the bytes changed")
    for side in sides.values():
        side.close()
    # The first turn starts threads and makes folders.
    return {name: row(total, {side: taken[1:] for side, taken in by.items()}) for name, by in times.items()}


def measure_restart(folder: Path, num_records: int) -> dict[str, float]:
    """Seconds until a tier with so many records serves again: page cache warm, and dropped."""
    first = Tier(folder / "restart", 4 * num_records * ALIGNMENT)
    (payload,) = memory(1, SMALL.groups[0].extent_bytes(SMALL.block_size))
    first.tier.close()
    for item in items_of(SMALL, [payload] * num_records, 0):
        name = item.key.hex()
        (folder / "restart" / name[:2] / name).write_bytes(item.header + bytes(payload))
    os.sync()
    found = {}
    for name in ("cold_s", "warm_s"):
        if name == "cold_s":
            drop_cache(folder)
        again = Tier(folder / "restart", 4 * num_records * ALIGNMENT)
        if again.tier.num_records != num_records:
            raise OSError("not every record was found")
        found[name] = round(again.start_s, 3)
        again.tier.close()
    shutil.rmtree(folder / "restart")
    return found


def measure(
    folder: Path, num_records: int = 64, reps: int = 5, restart_records: int = 10_000
) -> dict[str, Any]:
    """All figures, in a new folder below ``folder`` (on a disk), which is removed."""
    random.seed(0)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        table: dict[str, Any] = {}
        for layout in LAYOUTS:
            nbytes = layout.groups[0].extent_bytes(layout.block_size)
            table[f"record_{nbytes}"] = measure_layout(Path(made), layout, num_records, reps)
        table[f"restart_{restart_records}"] = measure_restart(Path(made), restart_records)
    return table


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?", default=Path.cwd())
    parser.add_argument("--records", type=int, default=64)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--restart", type=int, default=10_000)
    args = parser.parse_args()
    result = measure(args.folder, args.records, args.reps, args.restart)
    print(json.dumps({"records": args.records, **result, "load_average": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
