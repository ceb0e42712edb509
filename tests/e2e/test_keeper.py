"""A decode worker is killed and started again: what it had committed is there, and is not computed twice."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from services.cli.topology import Topology
from tests.chaos.cluster import Cluster, running
from tests.chaos.ledger import check_rest
from tests.chaos.scenario import send_and_judge
from tests.chaos.workload import plain_case

BLOCK_SIZE = 16
NUM_CASES = 4


async def kill_in_mid_stream(cluster: Cluster, min_blocks: int) -> None:
    """Once the decode worker holds so many blocks."""
    (spec,) = cluster.of_kind("decode")
    for _ in range(2000):
        status = await cluster.status(spec)
        if status is not None and status.num_running and status.num_blocks_held >= min_blocks:
            os.kill(cluster.pid(spec.name), signal.SIGKILL)
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the worker never came so far")


@pytest.mark.e2e
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "not kept"])
async def test_a_killed_worker_goes_on_from_its_own_blocks(kept: bool, tmp_path: Path) -> None:
    overrides = ["decode:kv.num_blocks=2048", "decode:scheduler.max_num_batched_tokens=32"]
    if not kept:
        overrides.append("decode:kv.keeper=")
    async with running(tmp_path, Topology(0, 0, 1, 0), overrides) as cluster:
        cases = [plain_case(7, number, max_tokens=900) for number in range(NUM_CASES)]
        answering = asyncio.create_task(send_and_judge(cluster, cases))
        await kill_in_mid_stream(cluster, 60)
        assert await answering == []
        (spec,) = cluster.of_kind("decode")
        samples = await cluster.metrics(spec)
        rests = await cluster.at_rest(8.0)
        restarts = cluster.restarts()[spec.name]
    assert restarts == 1
    queries, hits = (samples.total(f"triptych_prefix_cache_{name}_total") for name in ("queries", "hits"))
    recalled = samples.total("triptych_kv_blocks_recalled_total")
    assert queries > 4 * 40, "the requests did not move in mid-stream"
    if kept:
        assert recalled > 40
        # Of each answer the block that was being filled, and what a step in flight had not committed.
        assert queries - hits <= NUM_CASES * 2 * BLOCK_SIZE
    else:
        assert (recalled, hits) == (0, 0), "the control: without a keeper everything is computed again"
    assert check_rest(rests) == []
