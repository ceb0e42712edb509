"""Proof: where a prompt is computed follows what the link costs. It is slowed down to a tenth of what the
handoffs need, and the choice turns from apart to alone; its predictions are compared with what came.

Requests are asked one after the other, each with a prompt of its own, while a few streams run on decode:
without any, decode could as well do everything (``shared.routing.cost``).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from statistics import median

from msgspec import Struct

from services.cli.metrics_view import Samples
from tests.chaos.client import Client
from tests.chaos.cluster import Cluster
from tests.chaos.handoff_base import CLOCK, Book, Proof, Setting, Verdict, cluster_of, long_case
from tests.chaos.handoff_links import through_proxy
from tests.chaos.handoff_patched import patched
from tests.chaos.proxy import Proxy, Way

SETTINGS = (
    "scheduler.max_model_len=4096",
    "kv.num_blocks=4096",
    "router:routing.placement=cost",
    "transfer.deadline_s=20",
)
NUM_STREAMS, STREAM_TOKENS = 4, 3600
NUM_BEFORE, NUM_SLOW, NUM_AFTER = 30, 40, 20
FLIPS_WITHIN, MEDIAN_ERROR = 20, 0.3
#: A step costs what it would on a device, far above the noise of a busy machine.
PACED = patched(prefill="paced", decode="paced")
#: What was not measured for a minute is tried again.
FORGOTTEN_S = 75.0


class _Served(Struct):
    """One request: where it was computed, and by which costs."""

    choice: str
    predicted_s: float
    actual_s: float
    moved: int

    @property
    def error(self) -> float | None:
        return abs(self.predicted_s / self.actual_s - 1) if self.predicted_s and self.actual_s else None


async def prove(setting: Setting) -> list[Proof]:
    with through_proxy("prefill-0") as (proxy, settings):
        async with cluster_of(setting, "cost", "p=1,d=1", [*settings, *SETTINGS], as_spec=PACED) as (
            cluster,
            book,
        ):
            asker = _Asker(setting.seed, cluster, book, proxy)
            async with _streams(setting.seed, cluster):
                before = [await asker.ask() for _ in range(NUM_BEFORE)]
                apart = [s for s in before if s.choice == "apart" and s.actual_s]
                if not apart:
                    return [Proof("throttled link", False, f"nothing was served apart: {_costs(before)}")]
                needed = median(s.moved / s.actual_s for s in apart)
                proxy.slow(needed / 10, Way.BACK)
                slow = [await asker.ask() for _ in range(NUM_SLOW)]
                proxy.heal()
                back = await _back(setting, asker)
            verdict = await asyncio.to_thread(Verdict.of, book)
    return [_flip(before, slow, needed, verdict), _prediction([*before, *slow]), *back]


def _flip(before: list[_Served], slow: list[_Served], needed: float, verdict: Verdict) -> Proof:
    first = next((n for n, served in enumerate(slow, 1) if served.choice == "alone"), None)
    share = sum(s.choice == "apart" for s in before[len(before) // 2 :]) / (len(before) - len(before) // 2)
    stays = sum(s.choice == "alone" for s in slow[FLIPS_WITHIN:]) / (len(slow) - FLIPS_WITHIN)
    slowed = median(s.actual_s for s in slow[:2]) / median(s.actual_s for s in before)
    passed = first is not None and first <= FLIPS_WITHIN and share > 0.5 and stays > 0.5 and verdict.good
    figure = (
        f"link cut from {needed / 1000:.0f} to {needed / 10_000:.1f} kB/s, requests {slowed:.1f} x slower: "
        f"alone from request {first} on (at most {FLIPS_WITHIN}); apart before {share:.0%}, alone after "
        f"{stays:.0%}; {verdict}"
    )
    main = (first or 2 * NUM_SLOW, "requests until the first alone", FLIPS_WITHIN)
    return Proof("throttled link turns apart into alone", passed and slowed > 1.5, figure, main=main)


def _prediction(served: list[_Served]) -> Proof:
    errors = [error for s in served if (error := s.error) is not None]
    figures: dict[str, object] = {
        choice: round(median(e for s in served if s.choice == choice and (e := s.error) is not None), 3)
        for choice in ("apart", "alone")
        if any(s.choice == choice and s.error is not None for s in served)
    }
    figures["ms"] = _costs(served)
    found = median(errors) if errors else 1.0
    figure = (
        f"median |predicted / actual - 1| = {found:.2f} over {len(errors)} requests (at most {MEDIAN_ERROR})"
    )
    passed = found <= MEDIAN_ERROR and len(errors) > 30
    main = (found, "median of |predicted / actual - 1|", MEDIAN_ERROR)
    return Proof("predicted cost", passed, figure, figures, main=main)


def _costs(served: list[_Served]) -> list[tuple[str, float, float]]:
    """Choice, predicted and actual milliseconds; 0 where another decision fell into the same moment."""
    return [(s.choice, round(s.predicted_s * 1000, 1), round(s.actual_s * 1000, 1)) for s in served]


async def _back(setting: Setting, asker: _Asker) -> list[Proof]:
    """The link is whole again. What is not measured any more has to be forgotten first, so that this is for
    the long lane."""
    if setting.lane.name == "fast":
        return []
    began = CLOCK.now()
    back_s, apart = None, 0
    while CLOCK.now() - began < FORGOTTEN_S and apart < 5:
        apart += (await asker.ask()).choice == "apart"
        if apart and back_s is None:
            back_s = CLOCK.now() - began
        await asyncio.sleep(0.5)
    after = [await asker.ask() for _ in range(NUM_AFTER)]
    share = sum(s.choice == "apart" for s in after) / len(after)
    when = "never" if back_s is None else f"after {back_s:.0f} s"
    figure = f"apart again {when} (at most {FORGOTTEN_S:.0f} s), and then {share:.0%} of requests"
    return [Proof("healed link turns alone into apart", back_s is not None and share > 0.5, figure)]


class _Asker:
    """Asks one at a time and says of each where it was computed, by the router's metrics. Where another
    decision fell into the same moment, costs are left out."""

    def __init__(self, seed: int, cluster: Cluster, book: Book, proxy: Proxy) -> None:
        self._seed = seed
        self._cluster = cluster
        self._book = book
        self._proxy = proxy
        self._rng = random.Random(f"{seed}/cost")

    async def ask(self) -> _Served:
        number = len(self._book.cases)
        case = long_case(self._seed, number, self._rng.randint(400, 700), max_tokens=4)
        before, moved = await self._router(), self._proxy.passed(Way.BACK)
        await self._book.send([case])
        after = await self._router()
        made = {
            choice: _gained(before, after, "triptych_decisions_total", choice=choice)
            for choice in ("apart", "alone")
        }
        choice = max(made, key=lambda name: made[name])
        served = _Served(choice, 0.0, 0.0, self._proxy.passed(Way.BACK) - moved)
        if sum(made.values()) == 1:
            served.predicted_s, served.actual_s = (
                _gained(before, after, "triptych_decision_cost_seconds_sum", choice=choice, kind=kind)
                for kind in ("predicted", "actual")
            )
        return served

    async def _router(self) -> Samples:
        return await self._cluster.metrics(self._cluster.specs[0])


def _gained(before: Samples, after: Samples, name: str, **labels: str) -> float:
    return after.value(name, **labels) - before.value(name, **labels)


@asynccontextmanager
async def _streams(seed: int, cluster: Cluster) -> AsyncIterator[None]:
    """A few answers that are on their way all the time. Nobody waits for their ends."""
    client = Client(cluster.http, CLOCK)

    async def run(lane: int) -> None:
        number = 10_000_000 + 1_000 * lane
        while True:
            await client.send(long_case(seed, number, 20, max_tokens=STREAM_TOKENS))
            number += 1

    tasks = [asyncio.create_task(run(lane)) for lane in range(NUM_STREAMS)]
    await asyncio.sleep(0.5)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
