"""The short form of `make parity`: the same cells for six prompts; cheap ones with workers in this process,
those that need a store or a death with real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from msgspec import structs
from prometheus_client import generate_latest

from services.cli.demo import kv_group
from services.cli.metrics_view import Samples
from shared.config.services import WorkerConfig
from shared.telemetry.metrics import REGISTRY
from shared.transfer.base import TransferBackend
from tests.e2e.cells import (
    BLOCK_SIZE,
    MID_STREAM,
    Cell,
    ask_all,
    ask_and_kill,
    asked,
    fresh_trace,
    gained,
    migrated,
    prove_transfer,
)
from tests.e2e.engines import make_requests, make_worker, serve_alone, serve_apart
from tests.e2e.prompts import make_prompts
from tests.e2e.reference import Answer, Step, compute
from tests.e2e.serving import serving

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_PROMPTS, NUM_TOKENS, VOCAB_SIZE = 6, 12, 49152
CHUNK = 32


class Right:
    """What is asked, and what transformers answers to it."""

    def __init__(self, prompts: list[tuple[int, ...]], references: list[list[Step]]) -> None:
        self.prompts = prompts
        self.references = references
        self.num_blocks = sum(-(-len(prompt) // BLOCK_SIZE) for prompt in prompts)

    def check(self, answers: Sequence[Answer]) -> None:
        cell = Cell("")
        cell.judge(self.references, answers, VOCAB_SIZE)
        assert not cell.problems
        assert (cell.prompts, cell.tokens) == (NUM_PROMPTS, NUM_PROMPTS * NUM_TOKENS)


@pytest.fixture(scope="module")
def right(text_model: Path) -> Right:
    prompts = [prompt for prompt in make_prompts(text_model, 64) if len(prompt) <= 100][:NUM_PROMPTS]
    assert min(map(len, prompts)) > 3 * BLOCK_SIZE
    with make_worker("decode", text_model) as worker:
        drafts = serve_alone(worker, make_requests(worker, prompts, NUM_TOKENS, "draft"), NUM_PROMPTS)
    return Right(prompts, compute(text_model, prompts, [draft.token_ids for draft in drafts]))


def local_metrics() -> Samples:
    """The metrics of this process, which the workers in it share."""
    return Samples(generate_latest(REGISTRY).decode())


def test_aggregated_alone_in_a_batch_and_after_a_prefix_hit(text_model: Path, right: Right) -> None:
    with make_worker("decode", text_model) as worker:
        start = local_metrics()
        right.check(serve_alone(worker, make_requests(worker, right.prompts, NUM_TOKENS, "one"), 1))
        alone = local_metrics()
        assert gained(start, alone, "triptych_steps_total") >= NUM_PROMPTS * NUM_TOKENS
        requests = make_requests(worker, right.prompts, NUM_TOKENS, "batch")
        right.check(serve_alone(worker, requests, NUM_PROMPTS))
        batched = local_metrics()
        assert gained(alone, batched, "triptych_steps_total") * 3 < NUM_PROMPTS * NUM_TOKENS
        again = [structs.replace(request, request_id=f"again-{request.request_id}") for request in requests]
        answers = serve_alone(worker, again, NUM_PROMPTS)
        right.check(answers)
        assert min(answer.cached_tokens for answer in answers) >= 3 * BLOCK_SIZE


def test_chunked(text_model: Path, right: Right) -> None:
    with make_worker("decode", text_model, max_num_batched_tokens=CHUNK) as worker:
        start = local_metrics()
        requests = make_requests(worker, right.prompts, NUM_TOKENS, "chunked")
        right.check(serve_alone(worker, requests, NUM_PROMPTS))
        end = local_metrics()
    steps = gained(start, end, "triptych_step_tokens_count")
    assert 0 < steps == gained(start, end, "triptych_step_tokens_bucket", le=f"{CHUNK}.0")


def test_preempted(text_model: Path, right: Right) -> None:
    # Room for the first four prompts, and hardly for their answers.
    num_blocks = sum(-(-len(prompt) // BLOCK_SIZE) for prompt in right.prompts[:4]) + 1
    with make_worker("decode", text_model, num_blocks=num_blocks) as worker:
        start = local_metrics()
        requests = make_requests(worker, right.prompts, NUM_TOKENS, "tight")
        right.check(serve_alone(worker, requests, NUM_PROMPTS))
        assert gained(start, local_metrics(), "triptych_preemptions_total") > 0


def _tcp() -> TransferBackend:
    from shared.transfer.tcp import TcpBackend

    return TcpBackend("127.0.0.1")


def _nixl(name: str) -> TransferBackend:
    from shared.transfer.nixl import NixlBackend

    return NixlBackend(name)


@pytest.mark.parametrize("backend", ["tcp", "nixl"])
def test_prefill_and_decode_apart(text_model: Path, right: Right, backend: str) -> None:
    if backend == "nixl":
        pytest.importorskip("nixl_cu12", reason="nixl is not installed")
    makers: dict[str, Callable[[str], TransferBackend]] = {"tcp": lambda name: _tcp(), "nixl": _nixl}
    make = makers[backend]
    with (
        make_worker("prefill", text_model, backend=lambda: make("parity-prefill")) as prefill,
        make_worker("decode", text_model, backend=lambda: make("parity-decode")) as decode,
    ):
        start = local_metrics()
        requests = make_requests(prefill, right.prompts, NUM_TOKENS, backend)
        right.check(serve_apart(prefill, decode, requests))
        moved = gained(start, local_metrics(), "triptych_transfer_bytes_total", backend=backend, kind="kv")
        group = decode.backend.cache_spec(BLOCK_SIZE).groups[0]
        assert moved == right.num_blocks * group.extent_bytes(BLOCK_SIZE)


async def test_real_workers_apart_then_killed_then_from_the_store(
    text_model: Path, right: Right, tmp_path: Path
) -> None:
    """Over shared memory; then with decode killed in the middle of every stream; then, once other prompts
    have taken the prefill worker's blocks, from the store."""
    overrides = (f"prefill:kv.num_blocks={right.num_blocks + 2 * NUM_PROMPTS}",)
    with serving(text_model, tmp_path, "e=0,p=1,d=1,s=1", overrides) as deployment:
        config = deployment.spec("decode-0").config
        assert isinstance(config, WorkerConfig)
        requests = asked(right.prompts, NUM_TOKENS, "real")
        right.check(await ask_all(deployment, text_model, requests, NUM_PROMPTS))
        shm = Cell("shm")
        prove_transfer(shm, deployment, requests, kv_group(config).extent_bytes(BLOCK_SIZE), "shm")
        assert not shm.problems

        again = [fresh_trace(request, "again") for request in requests]
        answers, seen, killed = await ask_and_kill(deployment, text_model, again, "decode-0")
        right.check(answers)
        in_mid_stream = sum(MID_STREAM <= count < NUM_TOKENS for count in seen)
        assert 0 < in_mid_stream == len(migrated(deployment, again, seen))

        others = asked(right.prompts, 1, "other") + asked(right.prompts, 1, "another")
        await ask_all(deployment, text_model, others, NUM_PROMPTS)
        await deployment.until_back("decode-0", killed)
        before = deployment.metrics("prefill-0")
        answers = await ask_all(deployment, text_model, requests, NUM_PROMPTS)
        right.check(answers)
        hits = gained(before, deployment.metrics("prefill-0"), "triptych_kv_store_hits_total")
        assert hits * BLOCK_SIZE == sum(answer.cached_tokens for answer in answers)
        assert min(answer.cached_tokens for answer in answers) >= 3 * BLOCK_SIZE
        assert await deployment.at_rest() == {}
