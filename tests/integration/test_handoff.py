"""Encoder, prefill and decode engines of the witness model, joined by a few lines of router.

Real engine threads, arenas, shared-memory transfer and verification; the answer of every path must be
the oracle's, token for token.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from PIL import Image

from shared.config.services import KVConfig, SchedulerConfig
from shared.multimodal.hashing import mm_hash
from shared.runner.witness_config import load_witness_config
from shared.runner.witness_oracle import WitnessOracle
from shared.types.request import GenerationRequest, MediaItem, SamplingParams
from shared.types.transfer import BlockRef, KvTransferParams
from shared.types.worker import (
    AGGREGATED,
    DECODE,
    PREFILL,
    Abort,
    Attach,
    BlocksCommitted,
    Encode,
    Event,
    Failed,
    HandoffReady,
    Released,
    Reserved,
    Resume,
    Start,
    Tokens,
)
from tests.fakes.worker import ROUTER, WITNESS, InProcessWorker, worker_config

CONFIG = load_witness_config(WITNESS)
ORACLE = WitnessOracle(CONFIG)
MAX_LEN = 512


@pytest.fixture
def prefill() -> Iterator[InProcessWorker]:
    with InProcessWorker(worker_config("prefill")) as worker:
        yield worker


@pytest.fixture
def decode() -> Iterator[InProcessWorker]:
    with InProcessWorker(worker_config("decode")) as worker:
        yield worker


def make(name: str, prompt: list[int], **fields) -> GenerationRequest:
    sampling = SamplingParams(
        **{"max_tokens": 20, "temperature": 0.8, "seed": 7, **fields.pop("sampling", {})}
    )
    return GenerationRequest(name, "witness", tuple(prompt), len(prompt), sampling, **fields)


def oracle(request: GenerationRequest, choice: int = 0, media=()) -> list[int]:
    answer = ORACLE.generate(request.token_ids, request.sampling, choice, media, max_model_len=MAX_LEN)
    return list(answer.token_ids)


def of(request: GenerationRequest, kind: type):
    return lambda event: isinstance(event, kind) and event.request_id == request.request_id


def finished(request: GenerationRequest, choice: int):
    def matches(event: Event) -> bool:
        return of(request, Tokens)(event) and event.choice == choice and bool(event.finish_reason)

    return matches


def tokens_of(worker: InProcessWorker, request: GenerationRequest, choice: int = 0) -> list[int]:
    tokens: list[int] = []
    for event in worker.log.events:
        if of(request, Tokens)(event) and event.choice == choice:
            assert event.first_index == len(tokens) or worker.config.kind == "decode"
            tokens += event.token_ids
    return tokens


def hand_over(prefill: InProcessWorker, decode: InProcessWorker, request: GenerationRequest, **start) -> None:
    """What a router does between the two, until decode may go on."""
    decode.send(Start(request, DECODE))
    prefill.send(Start(request, PREFILL, **start))
    decode.log.wait_for(of(request, Reserved))
    ready = prefill.log.wait_for(of(request, HandoffReady))
    for event in list(prefill.log.events):
        if of(request, BlocksCommitted)(event):
            params = KvTransferParams(
                event.handoff_id, prefill.agent_info(), event.group, event.first, event.blocks
            )
            decode.send(Attach(request.request_id, params))
    firsts = [tokens_of(prefill, request, choice)[0] for choice in request.choices]
    ended = tuple(
        any(finished(request, choice)(event) for event in prefill.log.events) for choice in request.choices
    )
    decode.send(Resume(request.request_id, tuple(firsts), ready.num_blocks, ended))


def answer(prefill: InProcessWorker, decode: InProcessWorker, request: GenerationRequest, choice: int = 0):
    if not any(finished(request, choice)(event) for event in prefill.log.events):
        decode.log.wait_for(finished(request, choice))
    return tokens_of(prefill, request, choice) + tokens_of(decode, request, choice)


def at_rest(*workers: InProcessWorker) -> None:
    def nothing_held(worker: InProcessWorker) -> bool:
        status = worker.status()
        return not (status.num_blocks_held or status.num_leases or status.num_blocks_quarantined)

    for worker in workers:
        worker.wait(lambda w=worker: nothing_held(w))


def test_aggregated_answers_are_the_oracles(decode: InProcessWorker) -> None:
    request = make("a", list(range(5, 75)))
    decode.send(Start(request, AGGREGATED))
    decode.log.wait_for(finished(request, 0))
    assert tokens_of(decode, request) == oracle(request)
    at_rest(decode)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 70])
def test_disaggregated_answers_are_the_oracles(
    prefill: InProcessWorker, decode: InProcessWorker, length: int
) -> None:
    request = make(f"d{length}", [7 + i % 200 for i in range(length)])
    hand_over(prefill, decode, request)
    assert answer(prefill, decode, request) == oracle(request)
    at_rest(prefill, decode)


def test_a_prefix_that_decode_holds_is_not_pulled_again(
    prefill: InProcessWorker, decode: InProcessWorker
) -> None:
    first, second = (make(name, list(range(100, 164))) for name in ("one", "two"))
    for request in (first, second):
        hand_over(prefill, decode, request)
        assert answer(prefill, decode, request) == oracle(request)
    assert decode.log.wait_for(of(first, Reserved)).num_blocks_held == 0
    assert decode.log.wait_for(of(second, Reserved)).num_blocks_held == 4
    at_rest(prefill, decode)


def test_every_choice_goes_its_own_way(prefill: InProcessWorker, decode: InProcessWorker) -> None:
    request = make("n", list(range(3, 40)), choices=(0, 1, 2), sampling={"temperature": 1.5})
    hand_over(prefill, decode, request)
    for choice in request.choices:
        assert answer(prefill, decode, request, choice) == oracle(request, choice)
    at_rest(prefill, decode)


def test_a_request_goes_on_as_a_longer_prompt(decode: InProcessWorker) -> None:
    whole = make("w", list(range(9, 50)), sampling={"repetition_penalty": 1.3, "min_tokens": 12})
    tokens = oracle(whole)
    rest = GenerationRequest(
        "w-1",
        "witness",
        (*whole.token_ids, *tokens[:5]),
        whole.num_prompt_tokens,
        whole.sampling,
        num_emitted=5,
    )
    decode.send(Start(rest, AGGREGATED))
    decode.log.wait_for(finished(rest, 0))
    assert tokens_of(decode, rest) == tokens[5:]


def picture(width: int, height: int, colour: str) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(data, "PNG")
    return data.getvalue()


def test_a_picture_goes_through_all_three(prefill: InProcessWorker, decode: InProcessWorker) -> None:
    data = picture(64, 32, "red")
    digest = mm_hash(data, processor_version="1")
    num_rows = 5
    item = MediaItem(digest, 3, num_rows)
    prompt = [1, 2, 3, *[259] * num_rows, *range(20, 50)]
    request = make("p", prompt, media=(item,))
    with InProcessWorker(worker_config("encoder")) as encoder:
        encoder.engine.core.put_media(digest, data)
        encoder.send(Encode("p-enc", (digest,)))
        ready = encoder.log.wait_for(lambda e: isinstance(e, HandoffReady))
        assert ready.embeddings[0].num_rows == num_rows
        hand_over(prefill, decode, request, embeddings=ready.embeddings)
        assert answer(prefill, decode, request) == oracle(request, media=[(3, num_rows, data)])
        encoder.wait(lambda: encoder.status().num_leases == 0)
        at_rest(prefill, decode)


def test_decode_preempted_under_pressure_still_gives_the_oracles_tokens() -> None:
    small = worker_config(
        "decode",
        kv=KVConfig(block_size=16, num_blocks=20),
        scheduler=SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=16, max_model_len=256),
    )
    with InProcessWorker(small) as decode:
        requests = [
            make(f"r{i}", [i + 1] * 20, sampling={"max_tokens": 60, "ignore_eos": True}) for i in range(6)
        ]
        for request in requests:
            decode.send(Start(request, AGGREGATED))
        for request in requests:
            decode.log.wait_for(finished(request, 0))
            assert tokens_of(decode, request) == oracle(request)
        assert decode.engine.core._p.scheduler.num_preemptions > 0
        at_rest(decode)


@pytest.mark.parametrize("where", ["reserved", "prefilled", "attached", "decoding"])
def test_an_abort_anywhere_leaves_nothing(
    prefill: InProcessWorker, decode: InProcessWorker, where: str
) -> None:
    request = make("x", list(range(5, 90)), sampling={"max_tokens": 300, "ignore_eos": True})
    decode.send(Start(request, DECODE))
    decode.log.wait_for(of(request, Reserved))
    if where != "reserved":
        prefill.send(Start(request, PREFILL))
        prefill.log.wait_for(of(request, HandoffReady))
    if where == "decoding":
        hand_over(prefill, decode, make("y", [4, 5, 6]))
    if where == "attached":
        event = prefill.log.wait_for(of(request, BlocksCommitted))
        decode.send(Attach("x", KvTransferParams(event.handoff_id, prefill.agent_info(), 0, 0, event.blocks)))
    for worker in (prefill, decode):
        worker.send(Abort("x"), Abort("y"), Abort("unknown"))
    at_rest(prefill, decode)


def test_an_abort_while_a_chunk_is_computed_leaves_nothing(prefill: InProcessWorker) -> None:
    request = make("c", list(range(5, 95)))
    sent: list[Event] = []

    def abort_at_the_first_blocks(batch: list[Event]) -> None:
        # In the engine's thread, with the next chunk's step in flight.
        if not sent and any(map(of(request, BlocksCommitted), batch)):
            sent.extend(batch)
            prefill.send(Abort("c"))

    prefill.engine.core.subscribe(ROUTER, abort_at_the_first_blocks)
    prefill.send(Start(request, PREFILL))
    prefill.log.wait_for(of(request, Released))
    assert sum(map(of(request, BlocksCommitted), prefill.log.events)) == 1
    at_rest(prefill)


def test_a_lost_producer_means_local_prefill_with_the_same_tokens(decode: InProcessWorker) -> None:
    request = make("k", list(range(11, 80)))
    with InProcessWorker(worker_config("prefill")) as prefill:
        decode.send(Start(request, DECODE))
        prefill.send(Start(request, PREFILL))
        ready = prefill.log.wait_for(of(request, HandoffReady))
        event = prefill.log.wait_for(of(request, BlocksCommitted))
        first = tokens_of(prefill, request)[0]
        agent = prefill.agent_info()
    decode.send(Attach("k", KvTransferParams(event.handoff_id, agent, 0, 0, event.blocks)))
    decode.send(Resume("k", (first,), ready.num_blocks))
    decode.log.wait_for(finished(request, 0))
    assert [first, *tokens_of(decode, request)] == oracle(request)
    at_rest(decode)


def test_choices_without_their_producer_compute_the_prompt_apart(decode: InProcessWorker) -> None:
    """In chunks, in blocks that they shared until then."""
    request = make("a", list(range(11, 80)), choices=(0, 1, 2), sampling={"temperature": 1.5})
    with InProcessWorker(worker_config("prefill")) as prefill:
        agent = prefill.agent_info()
    decode.send(Start(request, DECODE))
    blocks = tuple(BlockRef(block_id, 1, (1, 2)) for block_id in range(5))
    decode.send(Attach("a", KvTransferParams("gone", agent, 0, 0, blocks)))
    expected = [oracle(request, choice) for choice in request.choices]
    decode.send(Resume("a", tuple(answer[0] for answer in expected), 5))
    for choice in request.choices:
        decode.log.wait_for(finished(request, choice))
    assert [tokens_of(decode, request, choice) for choice in request.choices] == [e[1:] for e in expected]
    at_rest(decode)


@pytest.mark.parametrize("offset", [3, 50])
def test_a_lost_producer_means_another_try_where_embeddings_are_missing(
    decode: InProcessWorker, offset: int
) -> None:
    item = MediaItem("ab", offset, 6)
    request = make("m", list(range(11, 80)), media=(item,))
    with InProcessWorker(worker_config("prefill")) as prefill:
        agent = prefill.agent_info()
    blocks = tuple(BlockRef(block_id, 1, (1, 2)) for block_id in range(5))
    decode.send(Start(request, DECODE))
    decode.send(Attach("m", KvTransferParams("gone", agent, 0, 0, blocks)))
    decode.send(Resume("m", (7,), 5))
    assert decode.log.wait_for(of(request, Failed)).retryable
    assert not tokens_of(decode, request)
    at_rest(decode)


def test_a_flipped_byte_is_found_and_computed_anew(prefill: InProcessWorker, decode: InProcessWorker) -> None:
    request = make("f", list(range(30, 99)))
    decode.send(Start(request, DECODE))
    prefill.send(Start(request, PREFILL))
    ready = prefill.log.wait_for(of(request, HandoffReady))
    event = next(e for e in prefill.log.events if of(request, BlocksCommitted)(e))
    block = prefill.arenas["kv"].block(0, event.blocks[0].block_id)
    block[8] ^= 1
    for committed in [e for e in prefill.log.events if of(request, BlocksCommitted)(e)]:
        params = KvTransferParams(
            committed.handoff_id, prefill.agent_info(), 0, committed.first, committed.blocks
        )
        decode.send(Attach("f", params))
    first = tokens_of(prefill, request)[0]
    decode.send(Resume("f", (first,), ready.num_blocks))
    decode.log.wait_for(finished(request, 0))
    assert [first, *tokens_of(decode, request)] == oracle(request)
    at_rest(prefill, decode)


def test_requests_that_cannot_be_served_are_refused_with_a_type(decode: InProcessWorker) -> None:
    too_long = make("long", [1] * MAX_LEN)
    other = GenerationRequest("other", "nobody", (1,), 1, SamplingParams(4))
    no_rows = make("media", [1, 2, 3], media=(MediaItem("ab", 0, 2),))
    for request in (too_long, other, no_rows):
        decode.send(Start(request, AGGREGATED))
    assert decode.log.wait_for(of(too_long, Failed)).code == "context_length_exceeded"
    assert decode.log.wait_for(of(other, Failed)).code == "model_not_found"
    assert decode.log.wait_for(of(no_rows, Failed)).retryable
    at_rest(decode)
