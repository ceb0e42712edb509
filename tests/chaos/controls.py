"""Runs that must go wrong: a check that cannot fail proves nothing.

``unguarded``: verification and recovery are off; a flipped byte must show as wrong tokens, and a killed
worker as failed requests. ``verified``: the same byte, with everything on, must be found and do no harm.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from msgspec import Struct

from services.cli.topology import Topology
from tests.chaos.cluster import Cluster, running
from tests.chaos.scenario import send_and_judge
from tests.chaos.workload import plain_case

#: The prefill worker changes one byte of the last block of this commit, after its checksum was taken.
FLIP = "prefill:runtime.failpoints=commit.after_checksum=flip:4"
NUM_FLIPPED, NUM_KILLED = 12, 8


class Control(Struct, frozen=True):
    """``failed_as_it_must``: the violations that had to show did, or those that must not did not."""

    name: str
    as_it_must: bool
    detail: str


async def run_controls(seed: int, root: Path) -> list[Control]:
    """All controls, side by side."""
    found = await asyncio.gather(_unguarded(seed, root / "unguarded"), _verified(seed, root / "verified"))
    return [control for controls in found for control in controls]


async def _unguarded(seed: int, root: Path) -> list[Control]:
    overrides = (FLIP, "decode:kv.verify=false", "router:routing.recovery=false")
    async with running(root, Topology(0, 1, 2, 0), overrides, restart=False) as cluster:
        flipped = [plain_case(seed, number) for number in range(NUM_FLIPPED)]
        wrong = [v for v in await send_and_judge(cluster, flipped) if v.rule == "tokens"]
        killed = [plain_case(seed, 100 + number, max_tokens=400) for number in range(NUM_KILLED)]
        running_ones = asyncio.create_task(send_and_judge(cluster, killed))
        await _kill_a_busy_one(cluster)
        lost = [v for v in await running_ones if v.rule == "ending"]
    return [
        Control(
            "verification off, byte flipped", bool(wrong), f"{len(wrong)} wrong answers of {NUM_FLIPPED}"
        ),
        Control("recovery off, decode killed", bool(lost), f"{len(lost)} failed requests of {NUM_KILLED}"),
    ]


async def _verified(seed: int, root: Path) -> list[Control]:
    async with running(root, Topology(0, 1, 1, 0), (FLIP,)) as cluster:
        violations = await send_and_judge(
            cluster, [plain_case(seed, number) for number in range(NUM_FLIPPED)]
        )
        (decode,) = cluster.of_kind("decode")
        found = (await cluster.metrics(decode)).total("triptych_checksum_failures_total")
    detail = f"{found:.0f} checksum failures counted, {len(violations)} violations"
    return [Control("verification on, byte flipped", found > 0 and not violations, detail)]


async def _kill_a_busy_one(cluster: Cluster) -> None:
    """SIGKILL to a decode worker that says that it runs something."""
    for _ in range(500):
        for spec in cluster.of_kind("decode"):
            status = await cluster.status(spec)
            if status is not None and status.num_running:
                os.kill(cluster.pid(spec.name), signal.SIGKILL)
                return
        await asyncio.sleep(0.005)
    raise RuntimeError("no decode worker ever ran anything")
