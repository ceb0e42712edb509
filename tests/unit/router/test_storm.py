"""Many requests while workers die, freeze and come back, in an order that a seed decides."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from shared.config.services import RoutingConfig
from shared.types.inference import ImagePart, InferenceRequest, Message, TextPart
from shared.types.request import SamplingParams
from shared.types.worker import Event, Failed, Start, Status
from tests.unit.router.cluster import Answer, Cluster
from tests.unit.router.requests import OTHER_PNG, PNG


def some_request(rng: random.Random, number: int) -> InferenceRequest:
    pictures = [ImagePart(data) for data in rng.sample([PNG, OTHER_PNG], rng.choice([0, 0, 1, 2]))]
    parts = (*pictures, TextPart(f"question {number} " + "x" * rng.randrange(30)))
    sampling = SamplingParams(rng.choice([1, 2, 9, 40]), ignore_eos=rng.random() < 0.5)
    return InferenceRequest(
        "witness", sampling, messages=(Message("user", parts),), n=rng.choice([1, 1, 2, 3]), seed=number
    )


def media_of(cluster: Cluster, answer: Answer) -> list[str]:
    """The media hashes of a served request, from any start that it led to."""
    assert answer.accepted is not None
    for worker in cluster.incarnations.values():
        for start in worker.got(Start):
            if start.request.request_id.startswith(f"{answer.accepted.request_id}-"):
                return [m.mm_hash for m in start.request.media]
    raise AssertionError("the request never started")


def arm(worker: Any, rng: random.Random) -> None:
    """Some events are the worker's last, some become failures."""

    def hook(event: Event) -> bool:
        if isinstance(event, (Status, Failed)):
            return True
        chance = rng.random()
        if chance < 0.01:
            worker.kill()
        elif chance < 0.02:
            worker.fail(event.request_id, "transfer_failed")
        return chance >= 0.02

    worker.hook = hook


@pytest.mark.parametrize("seed", range(12))
async def test_every_answer_is_exact_whatever_happens(make_cluster: Any, seed: int) -> None:
    rng = random.Random(seed)
    cluster = await make_cluster("eeppdd", routing=RoutingConfig(recovery_limit=1000, crash_limit=1000))
    for worker in cluster.workers.values():
        arm(worker, rng)
    requests = [some_request(rng, number) for number in range(12)]
    answers = [Answer() for _ in requests]
    pairs = list(zip(requests, answers, strict=True))
    tasks = [asyncio.create_task(cluster.consume(*pair)) for pair in pairs]
    while not all(task.done() for task in tasks):
        await cluster.pass_time()
        for worker_id, worker in list(cluster.workers.items()):
            if not worker.alive:
                arm(cluster.add(worker.info.kind, worker_id), rng)
            elif rng.random() < 0.02:
                worker.frozen = True
                arm(cluster.add(worker.info.kind, worker_id), rng)
    await cluster.settle()
    for request, answer in pairs:
        cluster.check_exact(answer, request, media_of(cluster, answer))
    assert sum(len(w.got(Start)) for w in cluster.incarnations.values()) > 2 * len(requests)


@pytest.mark.parametrize("seed", range(6))
async def test_leaving_clients_leave_nothing_in_a_storm(make_cluster: Any, seed: int) -> None:
    rng = random.Random(seed)
    cluster = await make_cluster("eeppdd")
    for worker in cluster.workers.values():
        arm(worker, rng)
    tasks = [
        asyncio.create_task(cluster.consume(some_request(rng, number), Answer(), limit=rng.randrange(1, 6)))
        for number in range(20)
    ]
    for _ in range(rng.randrange(3, 30)):
        await asyncio.sleep(0)
    for task in rng.sample(tasks, 10):
        task.cancel()
    while not all(task.done() for task in tasks):
        await cluster.pass_time()
        for worker_id, worker in list(cluster.workers.items()):
            if not worker.alive:
                arm(cluster.add(worker.info.kind, worker_id), rng)
    await asyncio.gather(*tasks, return_exceptions=True)
    await cluster.settle()
    cluster.check_clean()
