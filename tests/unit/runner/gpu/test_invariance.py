"""Batch-invariant results: equal bits alone, in a batch, cut into steps, after a prefix, and by a graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec import structs

from shared.models import weights
from shared.models.gpu_decoder import place
from shared.runner.gpu.device import CudaDevice
from shared.runner.gpu.runner import GpuRunner
from shared.step import LAST_SAMPLED, NewRow, RowStep, StepPlan, StepResult
from shared.types.kv import KVCacheSpec
from shared.types.request import SamplingParams
from tests.fakes.configs import tiny_config
from tests.unit.runner.driving import random_weights

pytestmark = pytest.mark.gpu

CONFIG = tiny_config(
    vocab_size=4096,
    num_valid_tokens=4096,
    hidden_size=1024,
    intermediate_size=2048,
    num_layers=6,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
    max_position=4096,
)
ROWS, LENGTH, BLOCK = 66, 1300, 16
#: Every logit is reported, so that equal results are equal bits.
ALL = SamplingParams(max_tokens=64, temperature=0.0, logprobs=4096)


class World:
    def __init__(self, path: Path) -> None:
        torch.manual_seed(0)
        spec = CONFIG.kv_cache_spec(BLOCK)
        spec = KVCacheSpec(BLOCK, tuple(structs.replace(g, dtype="bfloat16") for g in spec.groups))
        self.per_row = spec.num_blocks_for(LENGTH + 64)
        kv = torch.full(
            (ROWS * self.per_row, 8, 6, 2, BLOCK, 64), torch.nan, dtype=torch.bfloat16, device="cuda"
        )
        device = CudaDevice()
        placed = place(
            weights.load(random_weights(CONFIG, path / "w.safetensors"), CONFIG),
            device.device,
            torch.bfloat16,
        )
        self.runner = GpuRunner(
            CONFIG, placed, spec, [kv], device, max_rows=ROWS, max_model_len=LENGTH + 64, batch_invariant=True
        )
        self.order = torch.randperm(ROWS * self.per_row).tolist()

    def table(self, row: int) -> tuple[int, ...]:
        return tuple(self.order[row * self.per_row : (row + 1) * self.per_row])

    def step(self, *rows: RowStep, new: tuple[NewRow, ...] = ()) -> StepResult:
        return self.runner.execute(StepPlan(0, new_rows=new, rows=rows)).result()

    def prompt(self, row: int, tokens: list[int], cuts: tuple[int, ...]) -> StepResult:
        """A prompt in steps that end at ``cuts``, and at its end."""
        new, first = (NewRow(row, f"r{row}", 0, tuple(tokens), len(tokens), ALL),), 0
        for stop in (*cuts, len(tokens)):
            done = stop == len(tokens)
            part = RowStep(
                row,
                first,
                tuple(tokens[first:stop]),
                0,
                ((self.table(row) if not first else ()),),
                (row,) if done else (),
            )
            result = self.step(part, new=new if not first else ())
            first = stop
        return result


def tokens_of(row: int) -> list[int]:
    return torch.randint(
        0, 4096, (LENGTH - 17 * (row % 5),), generator=torch.Generator().manual_seed(row)
    ).tolist()


def test_results_do_not_depend_on_company_or_cuts(tmp_path: Path) -> None:
    world = World(tmp_path)
    prompt = tokens_of(0)
    whole = world.prompt(0, prompt, ())
    for row, cuts in ((1, (512, 1024)), (2, (7, 8, 700)), (3, (1299,))):
        again = world.prompt(row, prompt, cuts)
        assert again.logprobs == whole.logprobs, cuts
    for row in range(4, ROWS):
        world.prompt(row, tokens_of(row), (600,))
    alone = []
    for n in range(3):
        alone.append(world.step(RowStep(0, len(prompt) + n, (LAST_SAMPLED,), 0, ((),), (0,))))
    # The same three tokens in a batch of 65, and computed again as a prompt.
    at = {row: len(tokens_of(row)) for row in range(4, ROWS)} | {row: len(prompt) for row in (1, 2, 3)}
    for n in range(3):
        rows = tuple(RowStep(row, start + n, (LAST_SAMPLED,), 0, ((),), (row,)) for row, start in at.items())
        together = world.step(*rows)
        for row in (1, 2, 3):
            assert together.logprobs[together.rows.index(row)] == alone[n].logprobs[0], (row, n)
    history = [*prompt, whole.token_ids[0], *(step.token_ids[0] for step in alone[:2])]
    assert world.prompt(5, history, (100,)).logprobs == alone[2].logprobs
