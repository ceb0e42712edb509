"""Requests through the dispatcher when nothing goes wrong, and when the request itself is wrong."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared.config.services import RoutingConfig
from shared.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from shared.types.inference import InferenceRequest
from shared.types.request import SamplingParams
from shared.types.worker import AGGREGATED, Abort, Event, Renew, Reserved, Resume, Start, Tokens
from tests.unit.router.cluster import Answer, Cluster, oracle
from tests.unit.router.scripted_worker import EOS


def ask_for(prompt: str = "hello world", **options: Any) -> InferenceRequest:
    sampling = {"max_tokens": 12, "ignore_eos": True} | options.pop("sampling", {})
    return InferenceRequest("witness", SamplingParams(**sampling), prompt=prompt, **options)


def prompt_with(cluster: Cluster, wanted: Any, **options: Any) -> InferenceRequest:
    """A request, by trying prompts, whose oracle answer for choice 0 satisfies ``wanted``."""
    for number in range(5000):
        request = ask_for(f"prompt {number}", seed=5, **options)
        tokens, reason = oracle(request, list(request.prompt.encode()), 0, 5)
        if wanted(tokens, reason):
            return request
    raise AssertionError("no such prompt")


async def test_plain_request_is_exact_and_leaves_nothing(make_cluster: Any) -> None:
    cluster = await make_cluster("pd")
    request = ask_for()
    answer = await cluster.ask(request)
    cluster.check_exact(answer, request)
    assert answer.usage.cached_tokens == 4
    assert cluster.p0.got(Abort) and not cluster.d0.got(Abort)  # decode ended by itself


async def test_the_first_token_comes_from_prefill_at_once(make_cluster: Any) -> None:
    cluster = await make_cluster("pd")
    cluster.d0.hook = lambda event: False  # decode says nothing
    answer = await cluster.ask(ask_for(), limit=1)
    assert len(answer.tokens()) == 1


async def test_prefill_waits_for_the_reservation_when_decode_is_short_of_blocks(make_cluster: Any) -> None:
    """Else the blocks that each holds could be what the other waits for."""
    cluster = await make_cluster("pd")
    cluster.d0.num_blocks_free = 1
    await cluster.pass_time()
    held_back: list[Event] = []

    def hold_back(event: Event) -> bool:
        if isinstance(event, Reserved) and not held_back:
            held_back.append(event)
            return False
        return True

    cluster.d0.hook = hold_back
    request, answer = ask_for(), Answer()
    task = asyncio.create_task(cluster.consume(request, answer))
    await cluster.settle()
    assert cluster.d0.got(Start) and not cluster.p0.got(Start)
    cluster.d0.emit(*held_back)
    await cluster.finish(task)
    cluster.check_exact(answer, request)


async def test_a_handoff_that_decode_has_no_room_for_is_left_to_its_lease(make_cluster: Any) -> None:
    cluster = await make_cluster("pd")
    cluster.d0.hook = lambda event: not isinstance(event, Reserved | Tokens)
    request, answer = ask_for(), Answer()
    task = asyncio.create_task(cluster.consume(request, answer))
    for _ in range(30):
        await cluster.pass_time(0.5)
    assert answer.tokens(), "the first token is the client's at once"
    assert not any(c.handoff_ids for c in cluster.p0.got(Renew))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await cluster.settle()


async def test_acceptance_comes_with_the_first_token(make_cluster: Any) -> None:
    """So a request that fails before it has sent nothing, and gets its own status."""
    cluster = await make_cluster("pd")
    cluster.p0.hook = lambda event: False
    answer = await cluster.ask(ask_for(deadline_s=1.0))
    assert answer.accepted is None and answer.error.code == "deadline_exceeded"


async def test_every_choice_is_exact(make_cluster: Any) -> None:
    cluster = await make_cluster("pdd")
    request = ask_for(n=5, sampling={"ignore_eos": False, "max_tokens": 40})
    answer = await cluster.ask(request)
    cluster.check_exact(answer, request)


async def test_requests_do_not_mix(make_cluster: Any) -> None:
    cluster = await make_cluster("ppdd")
    requests = [ask_for(f"prompt {i}", n=1 + i % 3, sampling={"ignore_eos": i % 2 == 0}) for i in range(20)]
    answers = [Answer() for _ in requests]
    pairs = zip(requests, answers, strict=True)
    await cluster.finish(*(asyncio.create_task(cluster.consume(r, a)) for r, a in pairs))
    for request, answer in zip(requests, answers, strict=True):
        cluster.check_exact(answer, request)


async def test_finish_at_the_first_token_makes_no_handoff(make_cluster: Any) -> None:
    cluster = await make_cluster("pd")
    request = ask_for(n=3, sampling={"max_tokens": 1})
    answer = await cluster.ask(request)
    cluster.check_exact(answer, request)
    assert not cluster.d0.got(Resume)
    assert cluster.d0.got(Abort) and cluster.p0.got(Abort)


async def test_a_choice_that_finished_at_its_first_token_is_not_resumed(make_cluster: Any) -> None:
    cluster = await make_cluster("pd")
    sampling = {"ignore_eos": False, "max_tokens": 30}
    for number in range(3000):
        request = ask_for(f"prompt {number}", n=2, seed=3, sampling=sampling)
        firsts = [oracle(request, list(request.prompt.encode()), c, 3)[0] for c in (0, 1)]
        if firsts[0] == [EOS] and len(firsts[1]) > 3:
            break
    answer = await cluster.ask(request)
    cluster.check_exact(answer, request)
    (resume,) = cluster.d0.got(Resume)
    assert resume.finished == (True, False)


async def test_stop_string_ends_the_choice_and_the_work(make_cluster: Any) -> None:
    cluster = await make_cluster("pd")
    base = ask_for(seed=5, sampling={"max_tokens": 500})
    tokens, _ = oracle(base, list(base.prompt.encode()), 0, 5)
    stop = "".join(map(chr, tokens[7:9]))
    for include in (False, True):
        request = ask_for(seed=5, sampling={"max_tokens": 500}, stop=(stop,), include_stop_str=include)
        answer = await cluster.ask(request)
        text = "".join(map(chr, tokens[:9]))
        assert answer.text() == (text if include else text[:-2])
        assert answer.tokens() == tokens[:9]
        assert answer.finish() == "stop" and answer.deltas[-1].stop_reason == stop
        assert answer.usage.completion_tokens == 9
        assert cluster.d0.got(Abort)


async def test_a_stop_string_ends_one_choice_of_several(make_cluster: Any) -> None:
    cluster = await make_cluster("pd")
    base = ask_for(seed=5, n=2, sampling={"max_tokens": 60})
    runs = [oracle(base, list(base.prompt.encode()), c, 5)[0] for c in (0, 1)]
    stop = "".join(map(chr, runs[0][4:8]))
    answer = await cluster.ask(ask_for(seed=5, n=2, sampling={"max_tokens": 60}, stop=(stop,)))
    assert answer.tokens(0) == runs[0][:8] and answer.finish(0) == "stop"
    assert answer.tokens(1) == runs[1] and answer.finish(1) == "length"
    assert answer.usage.completion_tokens == 8 + 60
    assert next(a.choices for a in cluster.d0.got(Abort)) == (0,)


async def test_stop_string_at_the_first_token(make_cluster: Any) -> None:
    cluster = await make_cluster("pd")
    base = ask_for(seed=5)
    tokens, _ = oracle(base, list(base.prompt.encode()), 0, 5)
    answer = await cluster.ask(ask_for(seed=5, stop=(chr(tokens[0]),)))
    assert answer.tokens() == tokens[:1] and answer.text() == "" and answer.finish() == "stop"
    assert not cluster.d0.got(Resume)


async def test_stop_token_is_reported_when_asked_for(make_cluster: Any) -> None:
    cluster = await make_cluster("pd")
    request = prompt_with(cluster, lambda t, r: 4 < len(t) < 12, sampling={"stop_token_ids": (101,)})
    answer = await cluster.ask(request)
    assert answer.deltas[-1].stop_reason == 101 and answer.tokens()[-1] == 101
    assert answer.text() == "".join(map(chr, answer.tokens()[:-1]))


async def test_end_of_text_is_no_stop_reason(make_cluster: Any) -> None:
    cluster = await make_cluster("pd")
    sampling = {"ignore_eos": False, "max_tokens": 60}
    request = prompt_with(cluster, lambda t, r: len(t) > 2 and r == "stop", sampling=sampling)
    answer = await cluster.ask(request)
    cluster.check_exact(answer, request)
    assert answer.tokens()[-1] == EOS and answer.deltas[-1].stop_reason is None


@pytest.mark.parametrize("kinds", ["d", "p"])
async def test_one_phase_alone_serves_aggregated(make_cluster: Any, kinds: str) -> None:
    cluster = await make_cluster(kinds)
    request = ask_for(n=2)
    answer = await cluster.ask(request)
    cluster.check_exact(answer, request)
    (start,) = cluster.workers[f"{kinds}0"].got(Start)
    assert start.mode == AGGREGATED and answer.usage.cached_tokens == 4


async def test_leases_are_renewed_while_decode_is_not_under_way(make_cluster: Any) -> None:
    cluster = await make_cluster("pd")
    cluster.d0.hook = lambda event: isinstance(event, Reserved)
    answer = await cluster.ask(ask_for(deadline_s=10.0))
    renewed = [c.handoff_ids for c in cluster.p0.got(Renew)]
    assert 8 <= len(renewed) <= 11  # every second for ten seconds, with leases of six
    assert set(renewed) == {(f"kv-{cluster.p0.got(Start)[0].request.request_id}",)}
    wanted = {ids for c in cluster.d0.got(Renew) for ids in c.request_ids}
    assert wanted == {cluster.d0.got(Start)[0].request.request_id}, "the request itself is asked after"
    assert answer.error.code == "deadline_exceeded"


async def test_nothing_is_renewed_once_decode_is_under_way(make_cluster: Any) -> None:
    cluster = await make_cluster("pd")
    cluster.d0.hook = lambda event: (
        len(event.token_ids) and event.first_index < 4 if hasattr(event, "choice") else True
    )
    await cluster.ask(ask_for(deadline_s=10.0))
    assert len(cluster.p0.got(Renew)) <= 1


async def test_max_tokens_zero_fills_the_context(make_cluster: Any) -> None:
    cluster = await make_cluster("pd")
    answer = await cluster.ask(ask_for("x" * 4000, sampling={"max_tokens": 0}))
    assert len(answer.tokens()) == 96 and answer.finish() == "length"


async def test_ids_and_seeds_are_the_routers(make_cluster: Any) -> None:
    cluster = await make_cluster("pd")
    first, second = await cluster.ask(ask_for(label="same")), await cluster.ask(ask_for(label="same"))
    assert first.accepted.request_id != second.accepted.request_id
    assert first.accepted.seed != second.accepted.seed
    assert (await cluster.ask(ask_for(seed=77))).accepted.seed == 77


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (ask_for("x" * 4096), ContextLengthExceeded),
        (ask_for("x" * 4090), ContextLengthExceeded),
        (ask_for(n=0), InvalidRequest),
        (ask_for(n=17), InvalidRequest),
        (ask_for(""), InvalidRequest),
        (ask_for(deadline_s=0.0), InvalidRequest),
        (ask_for(deadline_s=float("nan")), InvalidRequest),
        (ask_for(sampling={"stop_token_ids": (260,)}), InvalidRequest),
        (ask_for(sampling={"logit_bias": ((-1, 1.0),)}), InvalidRequest),
        (InferenceRequest("witness", SamplingParams(4), prompt_token_ids=(1, 260)), InvalidRequest),
        (InferenceRequest("witness", SamplingParams(4), prompt_token_ids=()), InvalidRequest),
        (InferenceRequest("witness", SamplingParams(4), prompt="a", prompt_token_ids=(1,)), InvalidRequest),
        (InferenceRequest("witness", SamplingParams(4)), InvalidRequest),
        (InferenceRequest("witness", SamplingParams(4), messages=()), InvalidRequest),
        (InferenceRequest("other", SamplingParams(4), prompt="a"), ModelNotFound),
    ],
)
async def test_bad_requests_are_refused_before_any_worker_hears_of_them(
    make_cluster: Any, request_: InferenceRequest, error: type[Exception]
) -> None:
    cluster = await make_cluster("pd")
    answer = await cluster.ask(request_)
    assert type(answer.error) is error and answer.accepted is None
    assert not cluster.p0.commands and not cluster.d0.commands


async def test_ready_needs_every_phase(make_cluster: Any) -> None:
    cluster = await make_cluster("pd")
    assert not await cluster.dispatcher.ready()
    cluster.add("encoder", "e0")
    await cluster.settle()
    assert await cluster.dispatcher.ready()
    cluster.dispatcher.admission.drain()
    assert not await cluster.dispatcher.ready()


async def test_ready_needs_no_phase_that_the_deployment_does_not_have(make_cluster: Any) -> None:
    cluster = await make_cluster("", routing=RoutingConfig(phases=("decode",)))
    assert not await cluster.dispatcher.ready()
    cluster.add("decode", "d0")
    await cluster.settle()
    assert await cluster.dispatcher.ready()


async def test_model_card_shows_what_the_workers_can_hold(make_cluster: Any) -> None:
    cluster = await make_cluster("pd")
    (card,) = await cluster.dispatcher.models()
    assert (card.name, card.max_model_len, card.vocab_size, card.vision) == ("witness", 4096, 260, True)
    assert await cluster.dispatcher.token_text("witness", (97, EOS)) == [b"a", b"<|im_end|>"]
