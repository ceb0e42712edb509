"""Workers that die, freeze, fail or come back while a request is under way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared.config.services import LimitsConfig, RoutingConfig
from shared.types.worker import (
    AGGREGATED,
    Abort,
    Attach,
    BlocksCommitted,
    Event,
    HandoffReady,
    Released,
    Reserved,
    Resume,
    Start,
    Tokens,
)
from tests.unit.router.cluster import Answer
from tests.unit.router.requests import OTHER_PNG, PNG, ask_for, hashes_of, kill_at, picture_request


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("victim", "kind", "count"),
    [
        ("p0", BlocksCommitted, 1),
        ("p0", BlocksCommitted, 2),
        ("p0", Tokens, 1),
        ("p0", Tokens, 2),
        ("p0", HandoffReady, 1),
        ("d0", Reserved, 1),
        ("d0", Tokens, 1),
        ("d0", Tokens, 2),
        ("d0", Tokens, 9),
        ("d0", Tokens, 20),
    ],
)
async def test_a_killed_worker_costs_no_token(
    make_cluster: Any, n: int, victim: str, kind: type[Event], count: int
) -> None:
    cluster = await make_cluster("ppdd")
    kill_at(cluster.workers[victim], kind, count)
    request = ask_for(n=n)
    cluster.check_exact(await cluster.ask(request), request)


@pytest.mark.parametrize("victim", ["p0", "d0"])
@pytest.mark.parametrize("command", [Start, Attach, Resume])
async def test_a_worker_killed_as_a_command_arrives(make_cluster: Any, victim: str, command: type) -> None:
    cluster = await make_cluster("ppdd")
    target, watched = cluster.workers[victim], cluster.d0
    handle = watched._handle

    def killing(received: Any) -> None:
        if isinstance(received, command):
            target.kill()
        if watched.alive:
            handle(received)

    watched._handle = killing  # type: ignore[method-assign]
    request = ask_for(n=2)
    cluster.check_exact(await cluster.ask(request), request)


async def test_the_last_prefill_dies_and_decode_serves_alone(make_cluster: Any) -> None:
    cluster = await make_cluster("pd")
    kill_at(cluster.p0, HandoffReady)
    request = ask_for(n=2)
    cluster.check_exact(await cluster.ask(request), request)
    assert [s.mode for s in cluster.d0.got(Start)][-1] == AGGREGATED


async def test_the_last_decode_dies_and_prefill_serves_alone(make_cluster: Any) -> None:
    cluster = await make_cluster("pd")
    kill_at(cluster.d0, Tokens, 3)
    request = ask_for()
    cluster.check_exact(await cluster.ask(request), request)
    assert [s.mode for s in cluster.p0.got(Start)][-1] == AGGREGATED


async def test_a_continuation_is_a_longer_prompt_of_one_choice(make_cluster: Any) -> None:
    cluster = await make_cluster("pdd")
    kill_at(cluster.d0, Tokens, 5)
    request = ask_for(n=2)
    answer = await cluster.ask(request)
    cluster.check_exact(answer, request)
    assert answer.usage.cached_tokens == 4  # what the first attempt found
    first, *later = [s.request for s in cluster.p0.got(Start)]
    assert first.choices == (0, 1) and sorted(r.choices for r in later) == [(0,), (1,)]
    for moved in later:
        assert moved.num_prompt_tokens == first.num_prompt_tokens
        emitted = moved.token_ids[moved.num_prompt_tokens :]
        assert len(emitted) == moved.num_emitted > 0
        assert list(emitted) == answer.tokens(moved.choices[0])[: moved.num_emitted]
    assert len({first.request_id, *(r.request_id for r in later)}) == 3


@pytest.mark.parametrize("index", [1, 3])
async def test_a_producer_may_die_once_decode_has_read_from_it(make_cluster: Any, index: int) -> None:
    cluster = await make_cluster("pd")

    def hook(event: Event) -> bool:
        if isinstance(event, Tokens) and event.first_index == index:
            cluster.p0.kill()
        return True

    cluster.d0.hook = hook
    request = ask_for()
    cluster.check_exact(await cluster.ask(request), request)
    assert len(cluster.d0.got(Start)) == 1


@pytest.mark.parametrize("phase", ["put", HandoffReady])
async def test_a_killed_encoder_is_replaced(make_cluster: Any, phase: Any) -> None:
    cluster = await make_cluster("eepd")
    if phase == "put":
        put = cluster.e0.put_media
        cluster.e0.put_media = lambda h, d: cluster.e0.kill() or put(h, d)  # type: ignore[method-assign]
    else:
        kill_at(cluster.e0, phase)
    request = picture_request(PNG)
    answer = await cluster.ask(request)
    cluster.check_exact(answer, request, hashes_of(cluster))


async def test_an_encoder_that_dies_before_its_rows_are_read(make_cluster: Any) -> None:
    """Prefill finds the producer gone and says so; the request is encoded elsewhere."""
    cluster = await make_cluster("eepd")
    handle = cluster.p0._handle

    def killing(command: Any) -> None:
        if isinstance(command, Start):
            cluster.e0.kill()
        handle(command)

    cluster.p0._handle = killing  # type: ignore[method-assign]
    request = picture_request(PNG)
    cluster.check_exact(await cluster.ask(request), request, hashes_of(cluster))
    assert cluster.e1.media


@pytest.mark.parametrize(
    ("victim", "kind", "count"), [("p0", Tokens, 1), ("d0", Tokens, 1), ("d0", Tokens, 4)]
)
async def test_pictures_are_encoded_again_for_a_continuation(
    make_cluster: Any, victim: str, kind: type[Event], count: int
) -> None:
    cluster = await make_cluster("eppdd")
    kill_at(cluster.workers[victim], kind, count)
    request = picture_request(PNG, OTHER_PNG, n=2)
    cluster.check_exact(await cluster.ask(request), request, hashes_of(cluster))


async def test_encoders_are_released_once_prefill_is_done(make_cluster: Any) -> None:
    cluster = await make_cluster("epd")
    cluster.d0.hook = lambda e: False
    task = asyncio.create_task(cluster.consume(picture_request(PNG, deadline_s=5.0), Answer()))
    await cluster.settle()
    assert cluster.e0.got(Abort) and not cluster.e0.holds and cluster.p0.holds
    await cluster.finish(task)


async def test_what_a_released_producer_still_says_counts_for_nothing(make_cluster: Any) -> None:
    cluster = await make_cluster("pd")

    def hook(event: Event) -> bool:
        if isinstance(event, Tokens) and event.first_index == 3:
            cluster.p0.emit(Tokens(event.request_id, 0, 9, (97,)))
        return True

    cluster.d0.hook = hook
    request = ask_for()
    cluster.check_exact(await cluster.ask(request), request)


async def test_several_pictures_go_to_several_encoders(make_cluster: Any) -> None:
    cluster = await make_cluster("eepd")
    request = picture_request(PNG, OTHER_PNG, PNG)
    cluster.check_exact(await cluster.ask(request), request, hashes_of(cluster))
    assert len(cluster.e0.media) == len(cluster.e1.media) == 1
    assert cluster.e0.got(Abort) and cluster.e1.got(Abort)


async def test_without_an_encoder_pictures_wait_and_texts_do_not(make_cluster: Any) -> None:
    cluster = await make_cluster("pd", limits=LimitsConfig(no_worker_wait_s=5.0))
    request = ask_for()
    cluster.check_exact(await cluster.ask(request), request)
    answer = await cluster.ask(picture_request(PNG))
    assert answer.error.code == "overloaded" and answer.error.http_status == 503


async def test_a_frozen_worker_is_suspected_then_left(make_cluster: Any) -> None:
    cluster = await make_cluster("pdd")
    cluster.d0.hook = lambda e: not (isinstance(e, Tokens) and e.first_index >= 4)
    answer = Answer()
    request = ask_for()
    task = asyncio.create_task(cluster.consume(request, answer))
    await cluster.settle()
    assert len(answer.tokens()) == 4
    cluster.d0.frozen = True
    for _ in range(21):
        await cluster.pass_time()
    assert [w.info.worker_id for w in cluster.dispatcher.workers.usable().values()] == ["p0", "d1"]
    assert not cluster.d1.got(Start)
    await cluster.finish(task)
    cluster.check_exact(answer, request)
    assert len(cluster.d1.got(Start)) == 1


async def test_a_pause_of_the_router_is_not_held_against_workers(make_cluster: Any) -> None:
    cluster = await make_cluster("pd")
    cluster.clock.advance(30)
    cluster.dispatcher.tick()
    await cluster.settle()
    assert len(cluster.dispatcher.workers.usable()) == 2


async def test_late_events_of_a_replaced_incarnation_count_for_nothing(make_cluster: Any) -> None:
    cluster = await make_cluster("pd")
    old = cluster.d0
    held: list[Event] = []
    old.hook = lambda e: held.append(e) if isinstance(e, Tokens) and e.first_index == 3 else True
    answer = Answer()
    request = ask_for()
    task = asyncio.create_task(cluster.consume(request, answer))
    await cluster.settle()
    assert held
    cluster.add("decode", "d0")
    await cluster.settle()
    assert cluster.dispatcher.workers.live()[-1].info.incarnation == cluster.d0.info.incarnation
    old.hook = lambda e: True
    old.emit(*held, Tokens(held[0].request_id, 0, 3, (7,)))
    await cluster.finish(task)
    cluster.check_exact(answer, request)


async def test_late_events_of_an_abandoned_attempt_count_for_nothing(make_cluster: Any) -> None:
    """A live worker goes on for a moment with what it was told to stop."""
    cluster = await make_cluster("ppdd")
    d0_starts: list[str] = []

    def hook(event: Event) -> bool:
        if isinstance(event, Reserved):
            d0_starts.append(event.request_id)
            cluster.p0.kill()
        return True

    cluster.d0.hook = hook
    answer = Answer()
    request = ask_for()
    task = asyncio.create_task(cluster.consume(request, answer))
    await cluster.settle(10)
    cluster.d0.hook = lambda e: True
    cluster.d0.emit(Tokens(d0_starts[0], 0, len(answer.tokens()), (120,)))
    await cluster.finish(task)
    cluster.check_exact(answer, request)


async def test_a_worker_that_comes_back_drops_what_it_did_before(make_cluster: Any) -> None:
    cluster = await make_cluster("pd")
    cluster.d0.hook = lambda e: not isinstance(e, Tokens)
    answer = Answer()
    task = asyncio.create_task(cluster.consume(ask_for(), answer))
    await cluster.settle()
    request_id = cluster.d0.got(Start)[0].request.request_id
    cluster.d0.frozen = True
    for _ in range(40):
        await cluster.pass_time()
    assert len(cluster.dispatcher.workers) == 1
    cluster.d0.frozen = False
    cluster.d0.hook = lambda e: True
    cluster.dispatcher.workers.announced(cluster.d0.info)
    await cluster.settle()
    assert Abort(request_id) in cluster.d0.commands and len(cluster.dispatcher.workers) == 2
    await cluster.finish(task)


@pytest.mark.parametrize(("victim", "kind"), [("e0", HandoffReady), ("p0", BlocksCommitted), ("d0", Tokens)])
async def test_a_worker_that_gives_a_request_up_is_left_at_once(
    make_cluster: Any, victim: str, kind: type[Event]
) -> None:
    cluster = await make_cluster("eeppdd")
    worker = cluster.workers[victim]

    def giving_up(event: Event) -> bool:
        if isinstance(event, kind):
            worker.hook = lambda e: True
            worker.jobs.pop(event.request_id, None)
            worker.holds.pop(event.request_id, None)
            worker.emit(Released(event.request_id))
            return False
        return True

    worker.hook = giving_up
    request = picture_request(PNG)
    started = cluster.clock.now()
    cluster.check_exact(await cluster.ask(request), request, hashes_of(cluster))
    assert cluster.clock.now() - started < 1


async def test_a_release_that_was_due_changes_nothing(make_cluster: Any) -> None:
    """The reader has confirmed what it read, before the router saw its first token."""
    cluster = await make_cluster("epd")

    def confirmed(event: Event) -> bool:
        for producer in (cluster.p0, cluster.e0):
            if producer.holds.pop(event.request_id, None):
                producer.emit(Released(event.request_id))
        return True

    cluster.d0.hook = lambda e: isinstance(e, Reserved) or confirmed(e)
    request = picture_request(PNG)
    cluster.check_exact(await cluster.ask(request), request, hashes_of(cluster))
    assert len(cluster.d0.got(Start)) == 1


async def test_workers_that_go_down_in_order_are_no_crashes(make_cluster: Any) -> None:
    cluster = await make_cluster("pd", routing=RoutingConfig(crash_limit=1))

    def leaving(event: Event) -> bool:
        if isinstance(event, Tokens) and event.first_index == 4:
            cluster.d0.draining = True
            cluster.d0.heartbeat()
            asyncio.get_running_loop().call_later(0, cluster.d0.kill)
        return True

    cluster.d0.hook = leaving
    request = ask_for()
    cluster.check_exact(await cluster.ask(request), request)
    assert cluster.p0.got(Start)[-1].mode == AGGREGATED
