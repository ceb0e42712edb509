"""Where and when a figure was measured: what every file under bench/results says of itself."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def where_and_when(**versions: str) -> dict[str, Any]:
    """Date, commit and machine of a measurement; ``versions`` of packages stand with the machine."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "machine": {
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            "python": platform.python_version(),
            **versions,
        },
    }


def _commit() -> str:
    argv = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git on this machine
        return "unknown"
    return done.stdout.strip() or "unknown"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
