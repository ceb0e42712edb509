"""Failures that workers report, protocol violations, deadlines, clients that leave."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared.config.services import LimitsConfig, RoutingConfig
from shared.types.worker import (
    BlocksCommitted,
    Event,
    HandoffReady,
    Start,
    Tokens,
)
from tests.unit.router.cluster import Answer
from tests.unit.router.requests import PNG, ask_for, kill_at, picture_request


@pytest.mark.parametrize(("first_index", "what"), [(2, "repeat"), (4, "gap")])
async def test_a_token_out_of_order_ends_the_request(make_cluster: Any, first_index: int, what: str) -> None:
    cluster = await make_cluster("pd")

    def hook(event: Event) -> bool:
        if isinstance(event, Tokens) and event.first_index == 3:
            cluster.d0.hook = lambda e: True
            cluster.d0.emit(Tokens(event.request_id, 0, first_index, event.token_ids))
            return False
        return True

    cluster.d0.hook = hook
    answer = await cluster.ask(ask_for())
    assert answer.error.code == "determinism_violation" and answer.error.http_status == 500
    assert len(answer.tokens()) == 3


async def test_a_second_token_from_prefill_ends_the_request(make_cluster: Any) -> None:
    cluster = await make_cluster("pd")
    cluster.d0.hook = lambda e: False

    def hook(event: Event) -> bool:
        if isinstance(event, HandoffReady):
            cluster.p0.hook = lambda e: True
            cluster.p0.emit(Tokens(event.request_id, 0, 1, (97,)))
        return True

    cluster.p0.hook = hook
    assert (await cluster.ask(ask_for())).error.code == "determinism_violation"


@pytest.mark.parametrize(("victim", "kind"), [("p0", Tokens), ("d0", Tokens)])
async def test_without_recovery_a_lost_worker_ends_the_request(
    make_cluster: Any, victim: str, kind: type[Event]
) -> None:
    cluster = await make_cluster("ppdd", routing=RoutingConfig(recovery=False))
    kill_at(cluster.workers[victim], kind, 1)
    answer = await cluster.ask(ask_for())
    assert answer.error.code == "worker_lost"


async def test_a_retryable_failure_goes_elsewhere(make_cluster: Any) -> None:
    cluster = await make_cluster("ppdd")
    done = []

    def hook(event: Event) -> bool:
        if isinstance(event, Tokens) and event.first_index == 4 and not done:
            done.append(event)
            cluster.d0.fail(event.request_id, "corrupt_block")
            return False
        return True

    cluster.d0.hook = hook
    cluster.d1.other_load = 5
    await cluster.pass_time()
    request = ask_for()
    cluster.check_exact(await cluster.ask(request), request)
    assert len(cluster.d0.got(Start)) == len(cluster.d1.got(Start)) == 1


async def test_failures_are_retried_only_so_often(make_cluster: Any) -> None:
    cluster = await make_cluster("pd", routing=RoutingConfig(recovery_limit=3))
    cluster.p0.hook = lambda e: (
        not isinstance(e, BlocksCommitted) or cluster.p0.fail(e.request_id, "out_of_blocks")
    )
    answer = await cluster.ask(ask_for())
    assert answer.error.code == "out_of_blocks" and len(cluster.p0.got(Start)) == 4


async def test_a_final_failure_goes_to_the_client(make_cluster: Any) -> None:
    cluster = await make_cluster("epd")
    handed: list[Event] = []

    def hook(event: Event) -> bool:
        if isinstance(event, HandoffReady):
            handed.append(event)
            cluster.e0.hook = lambda e: True
            cluster.e0.fail(event.request_id, "invalid_image", retryable=False)
            return False
        return True

    cluster.e0.hook = hook
    answer = await cluster.ask(picture_request(PNG))
    assert handed and answer.error.http_status == 400 and answer.error.code == "invalid_image"
    assert answer.accepted is None and not cluster.p0.commands


async def test_a_poison_request_is_quarantined_and_others_live(make_cluster: Any) -> None:
    cluster = await make_cluster("pddddd")
    for worker in list(cluster.workers.values())[1:]:
        kill_at(worker, Tokens)
    answer = await cluster.ask(ask_for())
    assert answer.error.code == "request_quarantined" and answer.error.http_status == 500
    assert sum(w.alive for w in cluster.workers.values()) == 3


async def test_waits_for_a_worker_and_goes_on(make_cluster: Any) -> None:
    cluster = await make_cluster("d")
    kill_at(cluster.d0, Tokens, 3)
    answer = Answer()
    request = ask_for()
    task = asyncio.create_task(cluster.consume(request, answer))
    for _ in range(20):
        await cluster.pass_time()
    assert not task.done() and cluster.dispatcher.census()["waiting"] == 1
    cluster.add("decode", "d0")
    await cluster.finish(task)
    cluster.check_exact(answer, request)


async def test_gives_up_when_no_worker_comes(make_cluster: Any) -> None:
    cluster = await make_cluster("", limits=LimitsConfig(no_worker_wait_s=2.0))
    started = cluster.clock.now()
    answer = await cluster.ask(ask_for())
    assert answer.error.code == "overloaded" and 2.0 <= cluster.clock.now() - started < 2.3


@pytest.mark.parametrize("deltas", range(1, 9))
async def test_the_client_leaves_in_the_middle(make_cluster: Any, deltas: int) -> None:
    cluster = await make_cluster("pd")
    await cluster.ask(ask_for(n=2, sampling={"max_tokens": 50}), limit=deltas)
    cluster.check_clean()


@pytest.mark.parametrize("turns", range(1, 24))
async def test_the_client_leaves_before_the_first_token(make_cluster: Any, turns: int) -> None:
    cluster = await make_cluster("epd")
    cluster.p0.hook = lambda e: not isinstance(e, Tokens)
    task = asyncio.create_task(cluster.consume(picture_request(PNG, n=2), Answer()))
    await cluster.settle(turns)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await cluster.settle()
    cluster.check_clean()


@pytest.mark.parametrize("silent", ["e0", "p0", "d0"])
async def test_the_deadline_ends_the_request_in_every_phase(make_cluster: Any, silent: str) -> None:
    cluster = await make_cluster("epd")
    cluster.workers[silent].hook = lambda e: False
    started = cluster.clock.now()
    answer = await cluster.ask(picture_request(PNG, deadline_s=2.0))
    assert answer.error.code == "deadline_exceeded" and answer.error.http_status == 504
    assert 2.0 <= cluster.clock.now() - started < 2.3


async def test_workers_are_told_how_much_time_is_left(make_cluster: Any) -> None:
    cluster = await make_cluster("pdd")
    cluster.p0.hook = lambda e: cluster.p0.alive
    kill_at(cluster.d0, Tokens, 2)
    request = ask_for(deadline_s=5.0)
    cluster.check_exact(await cluster.ask(request), request)
    lefts = [s.request.deadline_s for s in cluster.p0.got(Start)]
    assert lefts[0] == 5.0 and 0 < lefts[-1] <= 5.0


async def test_a_draining_worker_gets_no_new_work(make_cluster: Any) -> None:
    cluster = await make_cluster("pdd")
    cluster.d0.draining = True
    await cluster.pass_time()
    request = ask_for()
    cluster.check_exact(await cluster.ask(request), request)
    assert not cluster.d0.commands


async def test_a_bug_in_handling_an_event_ends_only_its_request(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await make_cluster("pd")

    def explode(self: object, worker: object, event: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setitem(cluster.dispatcher._handlers, BlocksCommitted, explode)
    answer = await cluster.ask(ask_for())
    assert answer.error.code == "internal_error" and len(cluster.dispatcher.workers) == 2


async def test_requests_beyond_the_limits_wait_or_are_refused_at_once(make_cluster: Any) -> None:
    cluster = await make_cluster("pd", limits=LimitsConfig(max_running=1, max_queued=1))
    answers = [Answer(), Answer(), Answer()]
    requests = [ask_for(seed=number) for number in range(3)]
    pairs = list(zip(requests, answers, strict=True))
    await cluster.finish(*(asyncio.create_task(cluster.consume(r, a)) for r, a in pairs))
    for request, answer in pairs[:2]:
        cluster.check_exact(answer, request)
    assert answers[2].error.code == "overloaded" and answers[2].accepted is None


async def test_drain_lets_requests_end_and_cuts_off_the_rest(make_cluster: Any) -> None:
    cluster = await make_cluster("pd")
    cluster.d0.hook = lambda e: not (isinstance(e, Tokens) and e.choice == 1 and e.first_index > 2)
    answers = [Answer(), Answer()]
    quick = asyncio.create_task(cluster.consume(ask_for(), answers[0]))
    stuck = asyncio.create_task(cluster.consume(ask_for(n=2), answers[1]))
    await cluster.settle(3)
    draining = asyncio.create_task(cluster.dispatcher.drain(5.0))
    await asyncio.sleep(0)
    late = await cluster.ask(ask_for())
    assert late.error.code == "shutting_down"
    while not draining.done():
        await cluster.pass_time()
    await quick
    await stuck
    assert answers[0].error is None and answers[0].usage is not None
    assert answers[1].error.code == "shutting_down" and answers[1].finish(0) == "length"
