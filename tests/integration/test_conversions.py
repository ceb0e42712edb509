"""Prefill and decode engines of different ranks and block sizes: their answers are the oracle's, and are made
from the KV that was handed over.
"""

from __future__ import annotations

import io
import json
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from shared.config.services import KVConfig, ModelConfig, RuntimeConfig
from shared.engine.backend import load_backend
from shared.errors import ConfigError
from shared.kernels.checksum import head_checksums
from shared.kv_cache.convert import can_convert
from shared.multimodal.hashing import mm_hash
from shared.runner.witness_config import load_witness_config
from shared.runner.witness_oracle import WitnessOracle
from shared.telemetry import metrics
from shared.transfer.base import TransferBackend
from shared.transfer.faulty import Fault, FaultKind, FaultyBackend
from shared.types.request import GenerationRequest, MediaItem
from shared.types.transfer import EcTransferParams, KvTransferParams
from shared.types.worker import (
    DECODE,
    PREFILL,
    Abort,
    Attach,
    BlocksCommitted,
    Encode,
    Event,
    HandoffReady,
    Reserved,
    Resume,
    Start,
)
from tests.fakes.worker import ROUTER, WITNESS, InProcessWorker, worker_config
from tests.integration.test_handoff import at_rest, finished, make, of, tokens_of

RANKS = [(1, 2), (2, 1), (4, 2), (2, 2), (2, 4)]
BLOCK_SIZES = [(16, 16), (16, 32), (32, 16)]
SHAPES = [(ranks, sizes) for ranks in RANKS for sizes in BLOCK_SIZES]
#: A few that have every kind of conversion in them.
SOME = [((1, 2), (16, 16)), ((4, 2), (16, 32)), ((2, 1), (32, 16))]
MAX_LEN = 512

Shape = tuple[tuple[int, int], tuple[int, int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The witness with four heads in two layers."""
    path = tmp_path_factory.mktemp("model") / "witness"
    shutil.copytree(WITNESS, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_kv_heads": 4, "num_layers": 2}))
    return path


class Pair:
    """A prefill and a decode engine, and the few lines of a router that relays blocks while prefill still
    computes. ``computed`` = tokens of each request's prompt that decode did not have to compute."""

    def __init__(
        self,
        model: Path,
        shape: Shape,
        *,
        verify: bool = True,
        wrap: Callable[[TransferBackend], TransferBackend] = lambda backend: backend,
    ) -> None:
        (p_ranks, d_ranks), (p_size, d_size) = shape
        self.prefill = InProcessWorker(config(model, "prefill", p_ranks, p_size))
        self.decode = InProcessWorker(config(model, "decode", d_ranks, d_size, verify=verify), wrap=wrap)
        self.oracle = WitnessOracle(load_witness_config(model))
        self.computed: dict[str, int] = {}
        self.hold_back = False
        self.runs: list[Attach] = []
        self._changed = threading.Condition()
        self._ready: dict[str, HandoffReady] = {}
        self.prefill.engine.core.subscribe(ROUTER, self._relay)
        intake = self.decode.engine.core._intake
        arrived = intake._arrived

        def note(request: GenerationRequest, sequences: dict[int, Any]) -> None:
            if sequences:
                self.computed[request.request_id] = next(iter(sequences.values())).num_computed
            arrived(request, sequences)

        intake._arrived = note

    def _relay(self, batch: list[Event]) -> None:
        for event in batch:
            if isinstance(event, BlocksCommitted):
                params = KvTransferParams(
                    event.handoff_id, self.prefill.agent_info(), event.group, event.first, event.blocks
                )
                self.runs.append(Attach(event.request_id, params))
                if not self.hold_back:
                    self.decode.send(self.runs[-1])
            if isinstance(event, HandoffReady):
                with self._changed:
                    self._ready[event.request_id] = event
                    self._changed.notify_all()

    def compute(self, request: GenerationRequest, embeddings: tuple[EcTransferParams, ...] = ()) -> None:
        """Reserve at decode, then prefill to the end; blocks are relayed meanwhile."""
        self.decode.send(Start(request, DECODE))
        self.decode.log.wait_for(of(request, Reserved))
        self.prefill.send(Start(request, PREFILL, embeddings))
        with self._changed:
            assert self._changed.wait_for(lambda: request.request_id in self._ready, 20)

    def resume(self, request: GenerationRequest) -> None:
        firsts = tuple(tokens_of(self.prefill, request, choice)[0] for choice in request.choices)
        ended = tuple(self._ended(request, choice) for choice in request.choices)
        num_blocks = self._ready[request.request_id].num_blocks
        self.decode.send(Resume(request.request_id, firsts, num_blocks, ended))

    def _ended(self, request: GenerationRequest, choice: int) -> bool:
        return any(map(finished(request, choice), list(self.prefill.log.events)))

    def answers(self, request: GenerationRequest) -> list[list[int]]:
        """Of every choice, when it is whole."""
        for choice in request.choices:
            if not self._ended(request, choice):
                self.decode.log.wait_for(finished(request, choice))
        return [
            tokens_of(self.prefill, request, choice) + tokens_of(self.decode, request, choice)
            for choice in request.choices
        ]

    def right(self, request: GenerationRequest, media: Any = ()) -> list[list[int]]:
        return [
            list(
                self.oracle.generate(
                    request.token_ids, request.sampling, choice, media, max_model_len=MAX_LEN
                ).token_ids
            )
            for choice in request.choices
        ]

    def serve(self, request: GenerationRequest) -> list[list[int]]:
        self.compute(request)
        self.resume(request)
        return self.answers(request)

    def held(self, request: GenerationRequest) -> int:
        """Blocks that decode had of the prompt when it reserved."""
        event = self.decode.log.wait_for(of(request, Reserved))
        assert isinstance(event, Reserved)
        return event.num_blocks_held

    def close(self) -> None:
        for worker in (self.decode, self.prefill):
            worker.__exit__(None, None, None)


def config(model: Path, kind: str, tp_size: int, block_size: int, *, verify: bool = True) -> Any:
    made = worker_config(
        kind,
        kv=KVConfig(block_size=block_size, num_blocks=1024 // block_size, verify=verify),
        runtime=RuntimeConfig(tp_size=tp_size),
    )
    return replace(made, model=ModelConfig(str(model)))


@pytest.fixture
def pair(model: Path) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def start(shape: Shape, **options: Any) -> Pair:
        made.append(Pair(model, shape, **options))
        return made[-1]

    yield start
    for one in made:
        one.close()


def prompt(rnd: random.Random, length: int) -> list[int]:
    return [rnd.randrange(256) for _ in range(length)]


def name_of(shape: Shape) -> str:
    ranks, sizes = shape
    return f"tp{ranks[0]}to{ranks[1]}-bs{sizes[0]}to{sizes[1]}"


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_every_prompt_is_answered_from_the_kv_that_came(shape: Shape, pair: Callable[..., Pair]) -> None:
    """Short ones, whole blocks of either size, tails, several choices; what came is never computed again."""
    both, rnd = pair(shape), random.Random(name_of(shape))
    layouts = [w.agent_info().layout for w in (both.prefill, both.decode)]
    assert layouts[0] is not None and layouts[1] is not None and can_convert(*layouts)
    lengths = [1, 15, 16, 17, 32, 33, 64, *[rnd.randrange(2, 200) for _ in range(4)]]
    for number, length in enumerate(lengths):
        choices = (0, 1, 2) if number % 4 == 3 else (0,)
        request = make(f"r{number}", prompt(rnd, length), choices=choices, sampling={"ignore_eos": True})
        assert both.serve(request) == both.right(request)
        assert both.computed[request.request_id] == length
    at_rest(both.prefill, both.decode)


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_prefixes_that_either_side_holds_are_used_there(shape: Shape, pair: Callable[..., Pair]) -> None:
    both, rnd = pair(shape), random.Random(name_of(shape))
    both_sizes = max(shape[1])
    shared = prompt(rnd, 2 * both_sizes + 5)
    for number, rest in enumerate((10, 30, 47)):
        request = make(f"s{number}", shared + prompt(rnd, rest), sampling={"ignore_eos": True})
        assert both.serve(request) == both.right(request)
        assert both.computed[request.request_id] == len(request.token_ids)
        held, cached = both.held(request), both._ready[request.request_id].num_cached_tokens
        assert held == (0 if number == 0 else len(shared) // shape[1][1])
        assert cached == (0 if number == 0 else len(shared) // shape[1][0] * shape[1][0])
    at_rest(both.prefill, both.decode)


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_what_was_taken_can_be_handed_on(shape: Shape, pair: Callable[..., Pair]) -> None:
    """Blocks made here have checksums of their own, one a head of the whole model, and they hold."""
    both = pair(shape)
    request = make("first", prompt(random.Random(4), 150), sampling={"ignore_eos": True})
    assert both.serve(request) == both.right(request)
    onward = make("onward", list(request.token_ids), sampling={"ignore_eos": True})
    both.decode.send(Start(onward, PREFILL))
    both.decode.log.wait_for(of(onward, HandoffReady))
    refs = [
        ref
        for event in both.decode.log.events
        if isinstance(event, BlocksCommitted) and event.request_id == "onward"
        for ref in event.blocks
    ]
    arenas = [arena for name, arena in both.decode.arenas.items() if name.startswith("kv")]
    assert len(refs) == -(-150 // shape[1][1])
    for ref in refs:
        blocks = [arena.block(0, ref.block_id) for arena in arenas]
        heads = 4 // len(arenas)
        assert ref.checksums == tuple(s for block in blocks for s in head_checksums(block, heads))
    both.decode.send(Abort("onward"))
    at_rest(both.prefill, both.decode)


def test_blocks_are_taken_while_prefill_still_computes(pair: Callable[..., Pair]) -> None:
    both = pair(((2, 1), (16, 32)))
    request = make("long", prompt(random.Random(1), 200), sampling={"ignore_eos": True})
    both.hold_back = True
    both.compute(request)
    assert len(both.runs) > 3, "one run a chunk"
    desk = both.decode.engine.desk
    for attach in both.runs[:-1]:
        both.decode.send(attach)
    both.decode.wait(lambda: desk.num_outstanding == 0)
    landing = both.decode.engine.core._intake._receiving["long"].landing
    assert landing is not None and landing.num_valid(7) == 6
    both.decode.send(both.runs[-1])
    both.resume(request)
    assert both.answers(request) == both.right(request)
    assert both.computed["long"] == 200


@pytest.mark.parametrize("shape", SOME, ids=name_of)
def test_a_picture_goes_through_all_three(shape: Shape, model: Path, pair: Callable[..., Pair]) -> None:
    both, data = pair(shape), io.BytesIO()
    Image.new("RGB", (64, 32), "red").save(data, "PNG")
    picture, num_rows = data.getvalue(), 5
    digest = mm_hash(picture, processor_version="1")
    with InProcessWorker(config(model, "encoder", 1, 16)) as encoder:
        for offset in (3, 14, 30):
            tokens = [*range(offset), *[259] * num_rows, *range(20, 50)]
            request = make(f"p{offset}", tokens, media=(MediaItem(digest, offset, num_rows),))
            encoder.engine.core.put_media(digest, picture)
            encoder.send(Encode(f"e{offset}", (digest,)))
            ready = encoder.log.wait_for(
                lambda e, o=offset: isinstance(e, HandoffReady) and e.request_id == f"e{o}"
            )
            assert isinstance(ready, HandoffReady)
            both.compute(request, ready.embeddings)
            both.resume(request)
            assert both.answers(request) == both.right(request, [(offset, num_rows, picture)])
            assert both.computed[request.request_id] == len(tokens)
        at_rest(both.prefill, both.decode)


def spoiled(both: Pair, rank: int, block: int, length: int) -> GenerationRequest:
    """A request of whose committed blocks one has a byte flipped, in one rank, before decode reads it."""
    request = make("f", prompt(random.Random(rank), length), sampling={"ignore_eos": True})
    both.hold_back = True
    both.compute(request)
    blocks = [ref for attach in both.runs for ref in attach.params.blocks]
    arenas = [arena for name, arena in both.prefill.arenas.items() if name.startswith("kv")]
    arenas[rank].block(0, blocks[block].block_id)[8] ^= 1
    for attach in both.runs:
        both.decode.send(attach)
    both.resume(request)
    return request


@pytest.mark.parametrize("shape", SOME, ids=name_of)
def test_a_flipped_byte_in_any_rank_is_found_and_its_block_computed_anew(
    shape: Shape, pair: Callable[..., Pair]
) -> None:
    theirs, ours = shape[1]
    for rank in range(shape[0][0]):
        both, length = pair(shape), 150
        seen = metrics.CHECKSUM_FAILURES.labels("kv")._value.get()
        request = spoiled(both, rank, 2, length)
        assert both.answers(request) == both.right(request)
        assert metrics.CHECKSUM_FAILURES.labels("kv")._value.get() == seen + 1
        assert both.computed["f"] == 2 * theirs // ours * ours > 0
        at_rest(both.prefill, both.decode)


@pytest.mark.parametrize("shape", SOME, ids=name_of)
def test_without_verification_the_flipped_byte_is_in_the_answer(
    shape: Shape, pair: Callable[..., Pair]
) -> None:
    """The control: the bytes that came are really used, and it is the checksum that protects them."""
    both = pair(shape, verify=False)
    request = spoiled(both, shape[0][0] - 1, 2, 150)
    assert both.answers(request) != both.right(request)
    assert both.computed["f"] == 150


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_no_fault_of_the_wire_changes_an_answer(shape: Shape, pair: Callable[..., Pair]) -> None:
    rnd = random.Random(name_of(shape))
    kinds = [FaultKind.TRUNCATE, FaultKind.FLIP, FaultKind.DELAY, FaultKind.FAIL]
    faults = {
        number: Fault(kind, rnd.randrange(1, 5 if kind is FaultKind.DELAY else 4000))
        for number in range(1, 3000, 7)
        for kind in [rnd.choice(kinds)]
    }
    hit: list[Fault] = []
    both = pair(shape, wrap=lambda backend: FaultyBackend(backend, faults, injected=hit.append))
    for number in range(8):
        request = make(f"w{number}", prompt(rnd, rnd.randrange(20, 150)), sampling={"ignore_eos": True})
        assert both.serve(request) == both.right(request)
    assert len(hit) > 5
    assert any(both.computed[f"w{number}"] for number in range(8))
    at_rest(both.prefill, both.decode)


def test_an_abort_in_the_middle_of_a_conversion_leaves_nothing(pair: Callable[..., Pair]) -> None:
    """With the last read of a pull on its way, and with blocks that wait for their other half."""
    both = pair(
        ((2, 1), (16, 32)),
        wrap=lambda backend: FaultyBackend(backend, {2: Fault(FaultKind.FREEZE, 60)}),
    )
    request = make("x", prompt(random.Random(2), 150), sampling={"max_tokens": 300, "ignore_eos": True})
    both.hold_back = True
    both.compute(request)
    for attach in both.runs[:2]:
        both.decode.send(attach)
    both.decode.send(Abort("x"))
    both.prefill.send(Abort("x"))
    at_rest(both.prefill, both.decode)
    both.hold_back = False
    again = make("y", prompt(random.Random(3), 100))
    assert both.serve(again) == both.right(again)
    at_rest(both.prefill, both.decode)


def test_ranks_that_cannot_share_the_heads_are_a_configuration_error(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"runtime\.tp_size=3 does not divide the model's 4 kv_heads"):
        load_backend(ModelConfig(str(model)), RuntimeConfig(tp_size=3))


def test_the_torch_runner_refuses_ranks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match=r"runtime\.tp_size=2"):
        load_backend(ModelConfig(str(tmp_path)), RuntimeConfig(tp_size=2))
