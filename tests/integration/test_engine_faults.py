"""What must not end an engine, hold it up or leave anything behind in it, however the timing falls."""

from __future__ import annotations

from shared.config.services import KVConfig, SchedulerConfig, TransferConfig
from shared.engine.build import max_model_len
from shared.types.worker import (
    AGGREGATED,
    DECODE,
    PREFILL,
    Abort,
    Drain,
    Event,
    Failed,
    HandoffReady,
    Released,
    Renew,
    Reserved,
    Start,
    Status,
    Tokens,
)
from tests.fakes.worker import ROUTER, InProcessWorker, worker_config
from tests.integration.test_handoff import answer, at_rest, finished, hand_over, make, of, oracle, tokens_of


def small(kind: str, num_blocks: int, **scheduler: int) -> InProcessWorker:
    limits = {"max_num_batched_tokens": 32, "max_num_seqs": 16, "max_model_len": 512, **scheduler}
    return InProcessWorker(
        worker_config(
            kind, kv=KVConfig(block_size=16, num_blocks=num_blocks), scheduler=SchedulerConfig(**limits)
        )
    )


def test_a_prompt_preempted_while_its_chunk_is_computed_is_computed_again() -> None:
    # The answers beside it grow until the last chunk finds no blocks, with the one before in flight.
    with small("prefill", 18) as prefill:
        streams = [
            make(f"a{i}", [i + 1] * 30, sampling={"max_tokens": 30, "ignore_eos": True}) for i in range(4)
        ]
        long = make("long", [9] * 140)
        prefill.send(*(Start(request, AGGREGATED) for request in streams), Start(long, PREFILL))
        prefill.log.wait_for(of(long, HandoffReady))
        assert prefill.engine.core._p.scheduler.num_preemptions > 0, "the test did not reach its subject"
        assert tokens_of(prefill, long) == oracle(long)[:1]
        for request in streams:
            prefill.log.wait_for(finished(request, 0))
            assert tokens_of(prefill, request) == oracle(request)
        prefill.send(Abort("long"))
        at_rest(prefill)


def test_handoffs_that_fill_the_whole_pool_go_on_one_after_the_other() -> None:
    with small("prefill", 64) as prefill, small("decode", 8) as decode:
        requests = [make(f"h{i}", [i + 1] * 64, sampling={"ignore_eos": True}) for i in range(2)]
        for request in requests:
            decode.send(Start(request, DECODE))
            decode.log.wait_for(of(request, Reserved))
        assert decode.status().num_blocks_free == 0, "the test did not reach its subject"
        for request in requests:
            hand_over_reserved(prefill, decode, request)
        for request in requests:
            assert answer(prefill, decode, request) == oracle(request)
        at_rest(prefill, decode)


def hand_over_reserved(prefill: InProcessWorker, decode: InProcessWorker, request) -> None:
    """As hand_over, for a request whose blocks decode holds already."""
    real = decode.send
    decode.send = lambda *commands: real(*(c for c in commands if not isinstance(c, Start)))
    try:
        hand_over(prefill, decode, request)
    finally:
        decode.send = real


def test_no_answer_outgrows_the_whole_pool() -> None:
    with small("decode", 8) as decode:
        first = make("long", [5] * 20, sampling={"max_tokens": 400, "ignore_eos": True})
        second = make("next", [6] * 20)
        decode.send(Start(first, AGGREGATED), Start(second, AGGREGATED))
        for request in (first, second):
            decode.log.wait_for(finished(request, 0))
        longest = max_model_len(decode.config, decode.backend)
        assert longest < 8 * 16
        assert len(tokens_of(decode, first)) == longest - 20
        assert tokens_of(decode, second) == oracle(second)
        at_rest(decode)


def test_more_choices_than_rows_fail_that_request_alone() -> None:
    with small("decode", 64, max_num_seqs=2) as decode:
        wide, other = make("wide", [1, 2, 3], choices=(0, 1, 2)), make("other", [1, 2, 3])
        decode.send(Start(wide, AGGREGATED), Start(other, AGGREGATED))
        assert not decode.log.wait_for(of(wide, Failed)).retryable
        decode.log.wait_for(finished(other, 0))
        assert tokens_of(decode, other) == oracle(other)
        at_rest(decode)


def test_a_request_id_that_is_being_received_is_refused() -> None:
    with small("decode", 64) as decode:
        request = make("twice", [1] * 20)
        decode.send(Start(request, DECODE), Start(request, DECODE))
        assert decode.log.wait_for(of(request, Failed)).code == "invalid_value"
        decode.send(Abort("twice"))
        decode.log.wait_for(of(request, Released))
        at_rest(decode)


def test_nothing_is_remembered_of_a_request_that_ended_with_a_step_in_flight() -> None:
    with small("decode", 64) as decode:
        requests = []
        for length in range(1, 33):
            plain = make(f"e{length}", [3] * length)
            # For some, the step in flight behind the stop token completes a block, in vain.
            requests.append(
                make(f"e{length}", [3] * length, sampling={"stop_token_ids": (oracle(plain)[1],)})
            )
        decode.send(*(Start(request, AGGREGATED) for request in requests))
        for request in requests:
            decode.log.wait_for(of(request, Released))
        decode.wait(lambda: decode.status().num_running == 0)
        assert not decode.engine.core._ending
        at_rest(decode)


def test_single_choices_stopped_before_their_prompt_is_done_end_alone() -> None:
    for stopped in ((0,), (1,), (0, 2)):
        with small("decode", 64) as decode:
            request = make("c", [4] * 100, choices=(0, 1, 2), sampling={"ignore_eos": True})
            decode.send(Start(request, AGGREGATED), Abort("c", stopped))
            decode.log.wait_for(of(request, Released))
            for choice in set(request.choices) - set(stopped):
                assert tokens_of(decode, request, choice) == oracle(request, choice)
            at_rest(decode)
            decode.wait(lambda d=decode: len(d.engine.core._p.scheduler._free_rows) == 16)


def test_a_stopped_choice_does_not_take_a_handoff_from_the_others() -> None:
    with small("prefill", 64) as prefill, small("decode", 64) as decode:
        request = make("s", [4] * 40, choices=(0, 1), sampling={"ignore_eos": True})
        prefill.send(Start(request, PREFILL))
        prefill.log.wait_for(of(request, HandoffReady))
        prefill.send(Abort("s", (1,)))
        prefill.wait(lambda: True)
        assert prefill.status().num_leases == 1
        decode.send(Abort("s"))
        prefill.send(Abort("s", (0,)))
        at_rest(prefill)


def test_a_drain_is_said_at_once() -> None:
    with small("decode", 64) as decode:
        said: list[Event] = []
        core = decode.engine.core
        core.subscribe(ROUTER, lambda batch: said.extend(e for e in batch if isinstance(e, Status)))
        request = make("r", [1] * 20, sampling={"max_tokens": 400, "ignore_eos": True})
        decode.send(Start(request, AGGREGATED))
        decode.log.wait_for(of(request, Tokens))
        decode.send(Drain(), Start(make("late", [1]), AGGREGATED))
        assert decode.log.wait_for(of(make("late", [1]), Failed)).retryable
        assert any(isinstance(e, Status) and e.status.draining for e in said)
        decode.log.wait_for(finished(request, 0))
        at_rest(decode)


def test_each_router_hears_of_its_own_requests_only() -> None:
    with small("decode", 64) as decode:
        heard: list[Event] = []
        decode.engine.core.subscribe("other", heard.extend)
        ours, theirs = make("ours", [1] * 20), make("theirs", [2] * 20)
        decode.send(Start(ours, AGGREGATED))
        decode.engine.core.submit("other", [Start(theirs, AGGREGATED), Start(ours, AGGREGATED)])
        decode.log.wait_for(finished(ours, 0))
        decode.wait(lambda: any(map(of(theirs, Released), heard)))
        assert tokens_of(decode, ours) == oracle(ours)
        assert not any(map(of(theirs, Tokens), decode.log.events))
        # A second request of the same id is refused, to whoever asked, and the first goes on.
        assert [type(e) for e in heard if isinstance(e, Failed | Tokens) and e.request_id == "ours"] == [
            Failed
        ]
        at_rest(decode)


def test_the_requests_of_a_lost_router_end_after_its_grace_and_no_others() -> None:
    """Requests that wait for a handoff: nothing else ends them."""
    transfer = TransferConfig(order=("shm",), lease_s=60.0, orphan_grace_s=0.2)
    with InProcessWorker(worker_config("decode", transfer=transfer)) as decode:
        ours, theirs = make("ours", [1] * 20), make("theirs", [2] * 20)
        decode.send(Start(ours, DECODE))
        decode.engine.core.submit("other", [Start(theirs, DECODE)])
        decode.wait(lambda: decode.status().num_waiting == 2)
        decode.engine.core.detached("other")
        decode.wait(lambda: decode.status().num_waiting == 1)
        assert not any(map(of(ours, Released), decode.log.events))
        decode.send(Abort("ours"))
        at_rest(decode)


def test_what_no_router_asks_after_ends_with_its_lease() -> None:
    transfer = TransferConfig(order=("shm",), lease_s=1.0)
    with InProcessWorker(worker_config("decode", transfer=transfer)) as decode:
        kept, forgotten = make("kept", [1] * 20), make("gone", [2] * 40)
        decode.send(Start(kept, DECODE), Start(forgotten, DECODE))
        while not any(map(of(forgotten, Released), decode.log.events)):
            decode.send(Renew((), ("kept", "unknown")))
            decode.wait(lambda: True)
        assert not any(map(of(kept, Released), decode.log.events))
        decode.send(Abort("kept"))
        at_rest(decode)
