"""How long `triptych up` takes until everything is ready, and what six processes hold in memory.

python -m tests.bench.bench_startup [--starts 3]

The model is built before. Memory is the proportional set size after enough long prompts to have touched every
block of every KV arena at least once.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from services.cli import procfs
from services.cli.deployment import Deployment
from services.cli.state import StateDir
from shared.config.services import WorkerConfig
from shared.models.registry import load_config
from tests.bench.client import Client, median
from tests.bench.figures import ROOT, Figure, record, save, table
from tests.bench.prompts import Prompt, prompts
from tests.bench.setting import (
    BENCH_STATE,
    end_on_sigterm,
    free_ports,
    say,
    served_model,
    six_processes,
    where,
)

_READY_S, _MEMORY_MB = 20.0, 3 * 1024.0
_LONG, _AT_ONCE = 1900, 4


def ready_seconds() -> float:
    """One cold `up --detach`, then `down`; the processes are new, files may be in the page cache."""
    ports = free_ports()
    state = ["--state-dir", str(BENCH_STATE / "up")]
    command = [sys.executable, "-m", "services.cli"]
    options = ["--http-port", str(ports.http), "--grpc-port", str(ports.grpc)]
    options += ["--metrics-port", str(ports.metrics), "--model", str(served_model())]
    began = time.perf_counter()
    subprocess.run([*command, "up", "--detach", *state, *options], cwd=ROOT, check=True, stdout=sys.stderr)
    seconds = time.perf_counter() - began
    subprocess.run([*command, "down", *state], cwd=ROOT, check=True, stdout=sys.stderr)
    return seconds


def memory_mb(deployment: Deployment) -> dict[str, float]:
    """Proportional set size by process."""
    return {name: procfs.pss_bytes(pid) / 2**20 for name, pid in deployment.pids().items()}


def touch_arenas(deployment: Deployment, supply: Iterator[Prompt]) -> int:
    """Long prompts until the decode workers together were given more tokens than their arenas hold: each
    passes through prefill's arena, one of theirs, and the store's. Returns the number of prompts."""
    client = Client(deployment.http_url, deployment.model, 2)
    count = -(-_tokens_of_decodes(deployment) // _LONG) + _AT_ONCE
    for done in range(0, count, _AT_ONCE):
        say(f"touching the KV arenas: {done} of {count} prompts")
        client.all_at_once([next(supply) for _ in range(_AT_ONCE)])
    return count


def _tokens_of_decodes(deployment: Deployment) -> int:
    """Tokens that the KV arenas of all decode workers hold."""
    total = 0
    for spec in deployment.specs:
        if isinstance(spec.config, WorkerConfig) and spec.config.kind == "decode":
            kv = spec.config.kv
            cache = load_config(served_model()).kv_cache_spec(kv.block_size)
            extent = sum(group.extent_bytes(kv.block_size) for group in cache.groups)
            total += (kv.num_blocks or (kv.memory_mb << 20) // extent) * kv.block_size
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description="Ready seconds and memory.")
    parser.add_argument("--starts", type=int, default=3)
    args = parser.parse_args()
    end_on_sigterm()
    busy = where()
    StateDir(BENCH_STATE / "up").prepare()
    supply = prompts(served_model(), _LONG)
    starts = [ready_seconds() for _ in range(args.starts)]
    with six_processes() as deployment:
        before = memory_mb(deployment)
        count = touch_arenas(deployment, supply)
        after = memory_mb(deployment)
    found = [
        Figure("ready after `triptych up`", median(starts), "s", _READY_S),
        Figure("memory of six processes, KV arenas touched", sum(after.values()), "MB", _MEMORY_MB),
        Figure("memory of six processes, just started", sum(before.values()), "MB"),
    ]
    details: dict[str, Any] = {
        "ready_s": [round(seconds, 2) for seconds in starts],
        "prompts": count,
        "memory_mb": {name: round(value) for name, value in after.items()},
        "memory_mb_before": {name: round(value) for name, value in before.items()},
    }
    save(record("startup", busy, found, details))
    print(table(found))
    print(details)


if __name__ == "__main__":
    main()
