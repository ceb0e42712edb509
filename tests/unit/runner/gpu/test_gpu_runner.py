"""A GPU's runner gives the answers of the CPU's, whatever a plan asks of it. Float32 on both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from shared.errors import ConfigError
from shared.kernels.checksum import head_checksums
from shared.models import weights
from shared.runner.gpu.runner import GpuRunner
from shared.runner.kv_tensors import EmbeddingMemory
from shared.step import LAST_SAMPLED, BlockCopy, BlockSeal, MediaRows, RowStep, StepPlan
from shared.types.request import MediaItem, SamplingParams
from tests.fakes.configs import tiny_config
from tests.unit.runner.driving import GREEDY, Driver, GpuDriver, random_weights

CONFIG = tiny_config(rms_norm_eps=1e-5)
PROMPT = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]
SAMPLED = SamplingParams(max_tokens=64, temperature=1.0, seed=5, top_p=0.9)
Make = Callable[..., Driver]


@pytest.fixture(scope="module")
def weights_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return random_weights(CONFIG, tmp_path_factory.mktemp("weights") / "tiny.safetensors")


@pytest.fixture
def make(weights_path: Path) -> Iterator[Make]:
    drivers: list[Driver] = []

    def build(kind: type[Driver] = GpuDriver, **options: object) -> Driver:
        options = {"block_size": 4, "max_rows": 4, "max_len": 64, **options}
        drivers.append(kind(CONFIG, weights_path, **options))  # type: ignore[arg-type]
        return drivers[-1]

    yield build
    for driver in drivers:
        driver.close()


def answer(
    driver: Driver, row: int, prompt: list[int], count: int, sampling: SamplingParams, chunk: int = 100
) -> list[int]:
    tokens = list(driver.prefill(row, prompt, sampling=sampling, chunk=chunk).token_ids)
    while len(tokens) < count:
        tokens += driver.decode({row: len(prompt) + len(tokens) - 1}).token_ids
    return tokens


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_answers_are_those_of_the_cpu(make: Make, sampling: SamplingParams) -> None:
    wanted = answer(make(Driver), 0, PROMPT, 4, sampling)
    assert answer(make(), 2, PROMPT, 4, sampling, chunk=6) == wanted


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_steps_are_launched_before_the_tokens_of_the_last_are_known(
    make: Make, sampling: SamplingParams
) -> None:
    wanted = {row: answer(make(Driver), row, PROMPT[row:], 4, sampling) for row in range(2)}
    driver = make()
    first = StepPlan(
        1,
        new_rows=tuple(driver.new_row(row, PROMPT[row:], sampling) for row in range(2)),
        rows=tuple(driver.chunk(row, PROMPT[row:], 0, len(PROMPT[row:]), row) for row in range(2)),
    )
    pending = [driver.runner.execute(first)]
    for n in range(3):
        rows = tuple(
            RowStep(row, len(PROMPT) - row + n, (LAST_SAMPLED,), 0, ((),), (row,)) for row in range(2)
        )
        pending.append(driver.runner.execute(StepPlan(n + 2, rows=rows)))
    got: dict[int, list[int]] = {0: [], 1: []}
    for step in pending:
        result = step.result()
        for row, token in zip(result.rows, result.token_ids, strict=True):
            got[row].append(token)
    assert got == wanted


def test_choices_fork_from_one_prompt_by_copy_on_write(make: Make) -> None:
    wanted = answer(make(Driver), 0, PROMPT, 2, GREEDY)
    driver = make()
    table = driver.blocks(0)
    driver.step(
        new_rows=tuple(driver.new_row(c, PROMPT, GREEDY, choice=c) for c in range(2)),
        rows=(driver.chunk(0, PROMPT, 0, len(PROMPT), 0, 1),),
    )
    tail = (len(PROMPT) - 1) // 4
    other = (*table[:tail], *driver.blocks(1)[tail:])
    result = driver.step(
        copies=(BlockCopy(0, table[tail], other[tail]),),
        rows=(
            RowStep(0, len(PROMPT), (LAST_SAMPLED,), 0, ((),), (0,)),
            RowStep(1, len(PROMPT), (LAST_SAMPLED,), 0, (other,), (1,)),
        ),
    )
    assert list(result.token_ids) == [wanted[1]] * 2


def test_sealed_blocks_carry_the_checksums_of_memory(make: Make) -> None:
    driver = make()
    table = driver.blocks(2)
    result = driver.step(
        new_rows=(driver.new_row(2, PROMPT),),
        rows=(driver.chunk(2, PROMPT, 0, len(PROMPT), 2),),
        seals=(BlockSeal(0, table[1]), BlockSeal(0, table[0])),
    )
    assert isinstance(driver.runner, GpuRunner)
    extents = [driver.runner._kv[0][block].cpu().numpy().tobytes() for block in (table[1], table[0])]
    assert result.checksums == tuple(head_checksums(memoryview(extent), 2) for extent in extents)


def test_rows_that_are_not_finite_fail_alone(make: Make) -> None:
    driver = make()
    for row in (0, 1):
        driver.prefill(row, PROMPT)
    assert isinstance(driver.runner, GpuRunner)
    driver.runner._kv[0][driver.blocks(0)[0]] = torch.nan
    result = driver.decode({0: len(PROMPT), 1: len(PROMPT)})
    assert (result.rows, result.failed_rows) == ((1,), (0,))
    assert len(result.token_ids) == len(result.logprobs) == 1


@pytest.mark.parametrize("chunk", [100, 3])
def test_embeddings_take_the_place_of_placeholders(make: Make, weights_path: Path, chunk: int) -> None:
    table = weights.load(weights_path, CONFIG).embed_VE
    memory = bytearray(b"\xff" * (8 * 2 * 4 * CONFIG.hidden_size))
    ec = EmbeddingMemory(memoryview(memory), 2, 4 * CONFIG.hidden_size)
    for i, token in enumerate(PROMPT[3:8]):
        ec.tensor()[(6, 1, 4)[i // 2] * 2 + i % 2] = table[token].float()
    masked = [*PROMPT[:3], *[103] * 5, *PROMPT[8:]]
    media = (MediaRows(MediaItem("h", 3, 5), (6, 1, 4)),)
    wanted = make(Driver).prefill(0, PROMPT, sampling=SAMPLED)
    got = make(embeddings=ec).prefill(0, masked, sampling=SAMPLED, media=media, chunk=chunk)
    assert got.token_ids == wanted.token_ids


def test_what_does_not_fit_is_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        make(max_len=257)
