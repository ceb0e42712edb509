"""A service with one thing changed: a guard taken out, for controls (a proof that passes without the guard
proves nothing), or a choice that is always the same. The product has no such switch; it is done to it from
outside, in this process alone.

    python -m tests.chaos.handoff_patched CHANGE SERVICE --config FILE
"""

from __future__ import annotations

import errno
import os
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from services.cli.topology import ProcessSpec

#: Bytes that a "full" disk takes.
FULL_BYTES = 256 << 10
#: A paced step's seconds, and those of each of its tokens.
STEP_S, TOKEN_S = 0.003, 0.0003


def trust_hashes() -> None:
    """Blocks of equal hash are taken for equal."""
    from shared.kv_cache.block_pool import BlockKey

    BlockKey.matches = lambda *args: True  # type: ignore[assignment, method-assign]


def fill_disk() -> None:
    """The disk is full after a while, where no file system can be made that is."""
    from shared.tiering import disk_files

    write_all, left = disk_files._write_all, FULL_BYTES

    def write(fd: int, buffers: Sequence[memoryview]) -> None:
        nonlocal left
        left -= sum(buffer.nbytes for buffer in buffers)
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_all(fd, buffers)

    disk_files._write_all = write


def always_load() -> None:
    """What the store may have is asked for, whatever computing it would cost: on a busy machine measured
    costs would decide how much a proof meets."""
    from shared.engine.tier_costs import TierCosts

    TierCosts.prefers_loading = lambda *args: True  # type: ignore[method-assign]


def paced() -> None:
    """Steps take as long as a device would need for their tokens, whatever this machine does beside: so that
    costs are what they are said to be. The witness itself needs next to nothing."""
    from shared.runner.witness.runner import WitnessRunner
    from shared.step import StepPlan

    execute = WitnessRunner.execute

    def slowly(runner: WitnessRunner, plan: StepPlan) -> Any:
        time.sleep(STEP_S + TOKEN_S * sum(len(row.token_ids) for row in plan.rows))
        return execute(runner, plan)

    WitnessRunner.execute = slowly  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[], None]] = {
    "always_load": always_load,
    "paced": paced,
    "trust_hashes": trust_hashes,
    "fill_disk": fill_disk,
}


class PatchedSpec(ProcessSpec):
    """Of a process that is started here. ``change`` is set on the class made by ``patched``."""

    change = ""

    def argv(self, config_file: Path) -> list[str]:
        module = "tests.chaos.handoff_patched"
        return [sys.executable, "-m", module, self.change, self.kind, "--config", str(config_file)]


def patched(**changes: str) -> Callable[[ProcessSpec], ProcessSpec]:
    """For ``running``: processes of these kinds with these changes."""
    found: dict[str, Any] = {
        kind: type("PatchedSpec", (PatchedSpec,), {"change": change}) for kind, change in changes.items()
    }
    return lambda spec: found.get(spec.kind, ProcessSpec)(spec.name, spec.kind, spec.config)


if __name__ == "__main__":
    CHANGES[sys.argv[1]]()
    _, _, service, *sys.argv[1:] = sys.argv
    runpy.run_module(f"services.{service}", run_name="__main__", alter_sys=True)
