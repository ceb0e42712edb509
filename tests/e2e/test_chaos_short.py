"""Chaos in little: real processes, one proven kill of each worker kind, every stream its oracle's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.scenario import Plan, run_plan


@pytest.mark.e2e
async def test_one_kill_of_each_kind_changes_no_answer(tmp_path: Path) -> None:
    plan = Plan(
        seed=7,
        num_requests=150,
        per_second=25.0,
        max_open=24,
        scale=0.8,
        kills=1,
        freezes=0,
        pause_s=(0.3, 0.8),
        give_up_s=20.0,
    )
    outcome = await run_plan(plan, tmp_path)
    assert outcome.violations == []
    assert {fault.kind for fault in outcome.faults if fault.verified} == {
        "encoder",
        "prefill",
        "decode",
        "kv_store",
    }
    assert {record.ending for record in outcome.seen} == {"done", "left"}
