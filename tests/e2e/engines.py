"""Workers in this process that answer prompts greedily: the cheap half of the parity check. What a router
does between prefill and decode is done here in a few lines, for all requests at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from shared.config.services import KVConfig, ModelConfig, SchedulerConfig, TransferConfig
from shared.transfer.base import TransferBackend
from shared.types.request import GenerationRequest, SamplingParams
from shared.types.transfer import KvTransferParams
from shared.types.worker import (
    AGGREGATED,
    DECODE,
    PREFILL,
    Attach,
    BlocksCommitted,
    Event,
    HandoffReady,
    Reserved,
    Resume,
    Start,
    Tokens,
)
from tests.e2e.reference import TOP, Answer
from tests.e2e.serving import CACHE, PATIENCE_S
from tests.fakes.worker import InProcessWorker, worker_config

MAX_MODEL_LEN = 512


def make_worker(
    kind: str,
    model_dir: Path,
    *,
    num_blocks: int = 128,
    max_num_batched_tokens: int = MAX_MODEL_LEN,
    backend: Callable[[], TransferBackend] | None = None,
) -> InProcessWorker:
    """A worker with the torch runner. ``backend`` replaces shared memory as its only transfer backend."""
    config = worker_config(
        kind,
        scheduler=SchedulerConfig(
            max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=16, max_model_len=MAX_MODEL_LEN
        ),
        kv=KVConfig(block_size=16, num_blocks=num_blocks),
    )
    config = replace(config, model=ModelConfig(str(model_dir), cache_dir=str(CACHE)))
    if backend is None:
        return InProcessWorker(config)
    made = backend()

    def instead(shm: TransferBackend) -> TransferBackend:
        shm.close()
        return made

    return InProcessWorker(replace(config, transfer=TransferConfig(order=(made.name,))), wrap=instead)


def make_requests(
    worker: InProcessWorker, prompts: Sequence[tuple[int, ...]], num_tokens: int, salt: str
) -> list[GenerationRequest]:
    """Greedy requests with log-probabilities; ids are unique as long as salts are."""
    sampling = SamplingParams(num_tokens, temperature=0.0, ignore_eos=True, logprobs=TOP)
    model = worker.backend.identity.model
    return [
        GenerationRequest(f"{salt}-{index}", model, prompt, len(prompt), sampling, cache_salt=salt)
        for index, prompt in enumerate(prompts)
    ]


def serve_alone(
    worker: InProcessWorker, requests: Sequence[GenerationRequest], at_a_time: int
) -> list[Answer]:
    """One worker does everything."""
    for first in range(0, len(requests), at_a_time):
        group = requests[first : first + at_a_time]
        worker.send(*(Start(request, AGGREGATED) for request in group))
        for request in group:
            worker.log.wait_for(_finish_of(request), PATIENCE_S)
    return [_answer(request, worker) for request in requests]


def serve_apart(
    prefill: InProcessWorker, decode: InProcessWorker, requests: Sequence[GenerationRequest]
) -> list[Answer]:
    """All requests at once, prefill and decode on a worker each."""
    for request in requests:
        decode.send(Start(request, DECODE))
        decode.log.wait_for(_of(request, Reserved), PATIENCE_S)
        prefill.send(Start(request, PREFILL))
    for request in requests:
        ready = prefill.log.wait_for(_of(request, HandoffReady), PATIENCE_S)
        assert isinstance(ready, HandoffReady)
        for event in list(prefill.log.events):
            if isinstance(event, BlocksCommitted) and event.request_id == request.request_id:
                agent = prefill.agent_info()
                params = KvTransferParams(event.handoff_id, agent, event.group, event.first, event.blocks)
                decode.send(Attach(request.request_id, params))
        first = _answer(request, prefill).token_ids
        decode.send(Resume(request.request_id, first, ready.num_blocks))
    for request in requests:
        decode.log.wait_for(_finish_of(request), PATIENCE_S)
    return [_answer(request, prefill, decode) for request in requests]


def _answer(request: GenerationRequest, *workers: InProcessWorker) -> Answer:
    """All tokens of a request, in the order of the workers."""
    events = [
        event
        for worker in workers
        for event in list(worker.log.events)
        if isinstance(event, Tokens) and event.request_id == request.request_id
    ]
    entries = [entry for event in events for entry in event.logprobs]
    return Answer(
        tuple(token_id for event in events for token_id in event.token_ids),
        tuple(entry.logprob for entry in entries),
        tuple(dict(zip(entry.top_ids, entry.top_logprobs, strict=True)) for entry in entries),
        events[0].num_cached_tokens,
    )


def _of(request: GenerationRequest, kind: type) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, kind) and event.request_id == request.request_id


def _finish_of(request: GenerationRequest) -> Callable[[Event], bool]:
    def matches(event: Event) -> bool:
        return (
            isinstance(event, Tokens) and event.request_id == request.request_id and bool(event.finish_reason)
        )

    return matches
