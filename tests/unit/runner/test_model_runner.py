"""What a plan does to the model runner: a tiny random model, checked against computing it alone."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from shared.errors import ConfigError
from shared.kernels import library
from shared.kernels.checksum import head_checksums
from shared.models import weights
from shared.runner.kv_tensors import EmbeddingMemory
from shared.runner.model_runner import ModelRunner
from shared.step import LAST_SAMPLED, BlockCopy, BlockSeal, MediaRows, RowStep, StepPlan
from shared.types.request import MediaItem, SamplingParams
from tests.fakes.configs import tiny_config
from tests.unit.runner.driving import Driver, random_weights

CONFIG = tiny_config(architecture="LlamaForCausalLM", qk_norm=False, rms_norm_eps=1e-5)
PROMPT = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]
SAMPLED = SamplingParams(max_tokens=64, temperature=1.0, seed=5, logprobs=3)


@pytest.fixture(scope="module")
def weights_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return random_weights(CONFIG, tmp_path_factory.mktemp("weights") / "tiny.safetensors")


@pytest.fixture
def make_driver(weights_path: Path):
    drivers: list[Driver] = []

    def make(**options: object) -> Driver:
        options = {"block_size": 4, "max_rows": 4, "max_len": 64, **options}
        drivers.append(Driver(CONFIG, weights_path, **options))  # type: ignore[arg-type]
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.close()


def _answer(driver: Driver, row: int, prompt: list[int], count: int, sampling: SamplingParams) -> list[int]:
    """A prompt and its answer, computed alone."""
    tokens = list(driver.prefill(row, prompt, sampling=sampling).token_ids)
    while len(tokens) < count:
        tokens += driver.decode({row: len(prompt) + len(tokens) - 1}).token_ids
    return tokens


def test_logits_never_name_a_padding_row(make_driver) -> None:
    everything = SamplingParams(max_tokens=1, temperature=0.0, logprobs=104)
    result = make_driver().prefill(0, PROMPT, sampling=everything)
    (logprobs,) = result.logprobs
    assert logprobs is not None
    assert sorted(logprobs.top_ids) == list(range(100))
    assert torch.tensor(logprobs.top_logprobs).exp().sum().item() == pytest.approx(1.0, abs=1e-5)


def test_answers_do_not_depend_on_chunks_neighbours_or_pipelining(make_driver) -> None:
    expected = {row: _answer(make_driver(), row, PROMPT[row:], 12, SAMPLED) for row in range(4)}
    driver = make_driver()
    pending, positions = [], {}
    for row in range(4):
        prompt = PROMPT[row:]
        for first in range(0, len(prompt), 5):
            last = min(first + 5, len(prompt))
            others = [RowStep(r, p, (LAST_SAMPLED,), 0, ((),), (r,)) for r, p in positions.items()]
            samples = (row,) if last == len(prompt) else ()
            plan = StepPlan(
                len(pending),
                new_rows=(driver.new_row(row, prompt, SAMPLED),) if first == 0 else (),
                rows=(*others, driver.chunk(row, prompt, first, last, *samples)),
            )
            # Launched before the step before it has returned.
            pending.append(driver.runner.execute(plan))
            for r in positions:
                positions[r] += 1
        positions[row] = len(prompt)
    got: dict[int, list[int]] = {}
    for step in pending:
        result = step.result()
        for row, token in zip(result.rows, result.token_ids, strict=True):
            got.setdefault(row, []).append(token)
    assert len(got[0]) > 3
    assert all(expected[row][: len(tokens)] == tokens for row, tokens in got.items())


def test_choices_fork_from_one_prompt_by_copy_on_write(make_driver) -> None:
    alone = make_driver()
    expected = []
    for choice in range(3):
        row = alone.new_row(choice, PROMPT, SAMPLED, choice=choice)
        first = alone.step(new_rows=(row,), rows=(alone.chunk(choice, PROMPT, 0, len(PROMPT), choice),))
        second = alone.decode({choice: len(PROMPT)})
        expected.append([*first.token_ids, *second.token_ids])
    assert len({tuple(tokens) for tokens in expected}) > 1

    driver = make_driver()
    prompt_table = driver.blocks(0)
    first = driver.step(
        new_rows=tuple(driver.new_row(c, PROMPT, SAMPLED, choice=c) for c in range(3)),
        rows=(driver.chunk(0, PROMPT, 0, len(PROMPT), 0, 1, 2),),
    )
    assert first.rows == (0, 1, 2)
    tail = (len(PROMPT) - 1) // 4  # the block that the next token shares with the prompt
    tables = [(*prompt_table[:tail], *driver.blocks(c)[tail:]) for c in range(3)]
    second = driver.step(
        copies=tuple(BlockCopy(0, prompt_table[tail], tables[c][tail]) for c in (1, 2)),
        rows=tuple(
            RowStep(c, len(PROMPT), (LAST_SAMPLED,), 0, (tables[c] if c else (),), (c,)) for c in range(3)
        ),
    )
    assert [list(pair) for pair in zip(first.token_ids, second.token_ids, strict=True)] == expected


def test_a_table_is_replaced_from_an_index_on(make_driver) -> None:
    expected = _answer(make_driver(), 0, PROMPT, 3, SAMPLED)
    driver = make_driver()
    table = driver.blocks(0)
    driver.step(
        new_rows=(driver.new_row(0, PROMPT, SAMPLED),),
        rows=(RowStep(0, 0, tuple(PROMPT[:4]), 0, ((table[0], 999, 999),)),),
    )
    result = driver.step(rows=(RowStep(0, 4, tuple(PROMPT[4:]), 1, (table[1:],), (0,)),))
    assert list(result.token_ids) == expected[:1]


def test_sealed_blocks_carry_the_checksums_of_memory(make_driver) -> None:
    driver = make_driver()
    table = driver.blocks(2)
    result = driver.step(
        new_rows=(driver.new_row(2, PROMPT),),
        rows=(driver.chunk(2, PROMPT, 0, len(PROMPT), 2),),
        seals=(BlockSeal(0, table[0]), BlockSeal(0, table[1])),
    )
    extents = [memoryview(driver.memory)[b * driver.extent :][: driver.extent] for b in table[:2]]
    assert result.checksums == tuple(head_checksums(extent, 2) for extent in extents)
    assert driver.step(seals=(BlockSeal(0, table[0]),)).checksums == result.checksums[:1]


def test_non_finite_rows_fail_alone(make_driver) -> None:
    driver = make_driver()
    for row in (0, 1):
        driver.prefill(row, PROMPT)
    start = driver.blocks(0)[0] * driver.extent
    driver.memory[start : start + driver.extent] = b"\xff" * driver.extent
    result = driver.decode({0: len(PROMPT), 1: len(PROMPT)})
    assert (result.rows, result.failed_rows) == ((1,), (0,))
    assert len(result.token_ids) == len(result.logprobs) == 1


def test_a_freed_row_starts_anew(make_driver) -> None:
    driver = make_driver()
    expected = _answer(make_driver(), 0, PROMPT[2:], 3, SAMPLED)
    _answer(driver, 0, PROMPT, 5, SAMPLED)
    driver.step(free_rows=(0, 3))
    assert _answer(driver, 0, PROMPT[2:], 3, SAMPLED) == expected


def test_history_decides_penalties_and_random_position(make_driver) -> None:
    """A request that moved with four emitted tokens goes on as if it had not."""
    params = SamplingParams(
        max_tokens=64, temperature=1.0, seed=3, repetition_penalty=1.5, presence_penalty=0.5
    )
    expected = _answer(make_driver(), 0, PROMPT, 10, params)
    driver = make_driver()
    history = PROMPT + expected[:4]
    new = driver.new_row(1, PROMPT, params)
    moved = type(new)(1, "r1", 0, tuple(history), len(PROMPT), params)
    tokens = list(
        driver.step(new_rows=(moved,), rows=(driver.chunk(1, history, 0, len(history), 1),)).token_ids
    )
    while len(tokens) < 6:
        tokens += driver.decode({1: len(history) + len(tokens) - 1}).token_ids
    assert tokens == expected[4:]


@pytest.mark.parametrize("chunk", [100, 3])
def test_embeddings_take_the_place_of_placeholders(make_driver, weights_path: Path, chunk: int) -> None:
    """Rows of the ``ec`` memory that equal token embeddings give what those tokens give."""
    table = weights.load(weights_path, CONFIG).embed_VE
    rows_per_block, row_bytes = 2, 4 * CONFIG.hidden_size
    memory = bytearray(b"\xff" * (8 * rows_per_block * row_bytes))
    ec = EmbeddingMemory(memoryview(memory), rows_per_block, row_bytes)
    for i, token in enumerate(PROMPT[3:8]):  # five rows in blocks 6, 1, 4; the last one half full
        ec.tensor()[(6, 1, 4)[i // 2] * 2 + i % 2] = table[token].float()
    masked = [*PROMPT[:3], *[103] * 5, *PROMPT[8:]]
    media = (MediaRows(MediaItem("h", 3, 5), (6, 1, 4)),)
    expected = make_driver().prefill(0, PROMPT, sampling=SAMPLED)
    result = make_driver(embeddings=ec).prefill(0, masked, sampling=SAMPLED, media=media, chunk=chunk)
    assert result.token_ids == expected.token_ids
    assert result.logprobs == expected.logprobs


def test_closing_twice_is_safe_and_lets_the_memory_go(make_driver) -> None:
    driver = make_driver()
    driver.prefill(0, PROMPT)
    driver.close()
    driver.close()
    gc.collect()
    driver.memory.clear()  # BufferError while any view is left
    with pytest.raises(RuntimeError, match="closed"):
        driver.runner.execute(StepPlan(1))


def test_a_failing_step_raises_where_its_result_is_asked_for(make_driver) -> None:
    driver = make_driver()
    pending = driver.runner.execute(StepPlan(1, rows=(RowStep(3, 0, (5,), 0, ((0,),)),)))
    with pytest.raises(KeyError):
        pending.result()
    assert driver.prefill(0, PROMPT).rows == (0,)


def test_what_does_not_fit_is_refused(weights_path: Path) -> None:
    spec = CONFIG.kv_cache_spec(4)
    extent = spec.groups[0].extent_bytes(4)

    def build(kv_bytes: int, *, max_len: int = 64, row_bytes: int = 128) -> ModelRunner:
        return ModelRunner(
            CONFIG,
            weights_path,
            spec,
            [memoryview(bytearray(kv_bytes))],
            EmbeddingMemory(memoryview(bytearray(1024)), 2, row_bytes),
            max_rows=2,
            max_model_len=max_len,
        )

    for arguments in ({"kv_bytes": extent + 4}, {"kv_bytes": 0}):
        with pytest.raises(ConfigError, match="whole number"):
            build(**arguments)
    with pytest.raises(ConfigError, match="max_model_len"):
        build(extent, max_len=257)
    with pytest.raises(ConfigError, match="embedding rows"):
        build(extent, row_bytes=64)


@pytest.mark.parametrize("native", [True, False])
def test_batch_invariance_is_kept_or_refused(
    make_driver, weights_path: Path, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native and not library.available():
        pytest.skip("no C compiler")
    if not native:
        monkeypatch.setattr("shared.kernels.decoder.library", lambda: None)
    spec = CONFIG.kv_cache_spec(4)
    memory = [memoryview(bytearray(spec.groups[0].extent_bytes(4)))]

    def build() -> ModelRunner:
        return ModelRunner(
            CONFIG, weights_path, spec, memory, max_rows=1, max_model_len=4, batch_invariant=True
        )

    if native:
        build().close()
    else:
        with pytest.raises(ConfigError, match="compiler"):
            build()


def test_the_twins_give_the_same_answers(make_driver, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = SamplingParams(max_tokens=8, temperature=0.0)
    expected = [_answer(make_driver(), row, PROMPT[row:], 8, greedy) for row in range(3)]
    for module in ("linear", "norm", "decoder"):
        monkeypatch.setattr(f"shared.kernels.{module}.library", lambda: None)
    assert [_answer(make_driver(), row, PROMPT[row:], 8, greedy) for row in range(3)] == expected
