"""One chaos run: load and strikes at once, then quiet, then judgement. What it should be is its ``Plan``."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from services.cli.topology import Topology
from shared.clock import Clock, MonotonicClock
from tests.chaos import ledger
from tests.chaos.client import Client, Load
from tests.chaos.cluster import KINDS, Cluster, running
from tests.chaos.expected import Answers, compute_aside
from tests.chaos.faults import Striker
from tests.chaos.records import Case, Expected, Fault, Rest, Seen, Violation
from tests.chaos.workload import Workload

QUIET_S = 8.0


class Plan(Struct, frozen=True):
    """``kills`` of each kind and ``freezes`` of prefill and decode each, all proven; ``pause_s``: range of
    the rest before each strike; ``give_up_s``: when striking ends, proven or not."""

    seed: int
    num_requests: int = 2000
    per_second: float = 36.0
    max_open: int = 48
    scale: float = 1.0
    topology: Topology = Topology(encoders=2, prefills=2, decodes=2, kv_stores=1)
    kills: int = 5
    freezes: int = 1
    pause_s: tuple[float, float] = (0.3, 2.2)
    give_up_s: float = 100.0


class Outcome(Struct, frozen=True):
    """All that a run wrote down, and the verdict. ``seconds``: from the first request to the last ending."""

    plan: Plan
    cases: list[Case]
    seen: list[Seen]
    faults: list[Fault]
    rests: list[Rest]
    violations: list[Violation]
    counters: dict[str, float]
    seconds: float

    @property
    def stalls(self) -> dict[tuple[str, str], list[float]]:
        streamed = {case.number for case in self.cases if case.stream}
        return ledger.stalls(self.faults, [record for record in self.seen if record.number in streamed])


async def run_plan(plan: Plan, root: Path, overrides: Sequence[str] = ()) -> Outcome:
    """Start a cluster, run the plan on it, stop it, judge."""
    clock = MonotonicClock()
    workload = Workload(plan.seed, scale=plan.scale)
    async with running(root, plan.topology, overrides) as cluster:
        aside = asyncio.create_task(compute_aside(workload, plan.scale, 0, plan.num_requests))
        try:
            strikers = _strikers(plan, cluster, clock)
            client = Client(cluster.http, clock)
            load = Load(client, workload.case, per_second=plan.per_second, max_open=plan.max_open)
            began = clock.now()
            await _together(plan, load, strikers)
            seconds = clock.now() - began
            rests = await cluster.at_rest(QUIET_S)
            counters = await _counters(cluster)
            restarts, errors = cluster.restarts(), cluster.logged_errors()
            answers = await aside
        finally:
            aside.cancel()
    cases = [workload.case(number) for number in range(load.sent)]
    expected = _expected(cases, answers)
    faults = [fault for striker in strikers for fault in striker.faults]
    wanted = {(striker.kind, "kill"): plan.kills for striker in strikers}
    wanted |= {(kind, "freeze"): plan.freezes for kind in ("prefill", "decode")}
    violations = [
        *ledger.check_requests(cases, expected, load.seen),
        *ledger.check_faults(faults, wanted),
        *ledger.check_crashes(faults, restarts, errors),
        *ledger.check_rest(rests),
    ]
    return Outcome(plan, cases, load.seen, faults, rests, violations, counters, seconds)


async def send_and_judge(
    cluster: Cluster, cases: Sequence[Case], *, per_second: float = 100.0
) -> list[Violation]:
    """Send these cases, all open at a time if need be, and judge the answers. Their numbers count from
    wherever they like."""
    client = Client(cluster.http, MonotonicClock())
    load = Load(client, cases.__getitem__, per_second=per_second, max_open=len(cases))
    await load.run(len(cases), lambda: True)
    oracle = Answers()
    return ledger.check_requests(cases, {case.number: oracle.of(case) for case in cases}, load.seen)


def _expected(cases: Sequence[Case], answers: list[list[Expected]]) -> dict[int, list[Expected]]:
    """Those computed aside, and the few that were sent beyond the plan."""
    oracle = Answers()
    expected = dict(enumerate(answers))
    for case in cases[len(answers) :]:
        expected[case.number] = oracle.of(case)
    return expected


def _strikers(plan: Plan, cluster: Cluster, clock: Clock) -> list[Striker]:
    return [
        Striker(cluster, kind, clock, random.Random(f"{plan.seed}/{kind}"))
        for kind in KINDS
        if cluster.of_kind(kind)
    ]


async def _together(plan: Plan, load: Load, strikers: Sequence[Striker]) -> None:
    """Load until the requests are through and every striker is done."""
    striking = [
        asyncio.create_task(
            striker.run(
                plan.kills,
                plan.freezes if striker.kind in ("prefill", "decode") else 0,
                plan.pause_s,
                plan.give_up_s,
            )
        )
        for striker in strikers
    ]
    loading = asyncio.create_task(load.run(plan.num_requests, lambda: all(t.done() for t in striking)))
    await _all_or_none([loading, *striking])


async def _all_or_none(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for all; the first error ends the others and is raised."""
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _counters(cluster: Cluster) -> dict[str, float]:
    """What the router counted over the run, and the workers since their last start."""
    totals: dict[str, float] = {}
    names = (
        "triptych_migrations_total",
        "triptych_late_events_total",
        "triptych_checksum_failures_total",
        "triptych_kv_store_hits_total",
        "triptych_encoder_cache_hits_total",
        "triptych_leases_expired_total",
    )
    for spec in cluster.specs:
        samples = await cluster.metrics(spec)
        for name in names:
            totals[name] = totals.get(name, 0.0) + samples.total(name)
    return totals
