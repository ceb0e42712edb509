"""Drives a model runner by hand-made plans: what a scheduler would say, in the simplest order."""

from __future__ import annotations

from pathlib import Path

from shared.models import weights
from shared.models.config import ModelConfig
from shared.models.registry import load_config
from shared.runner.kv_tensors import EmbeddingMemory
from shared.runner.model_runner import ModelRunner
from shared.step import LAST_SAMPLED, MediaRows, NewRow, RowStep, StepPlan, StepResult
from shared.types.request import SamplingParams

GREEDY = SamplingParams(max_tokens=64, temperature=0.0)


class Driver:
    """A runner over memory of its own. Row r owns blocks r * blocks_per_row onwards, shuffled."""

    def __init__(
        self,
        config: ModelConfig,
        weights_path: Path,
        *,
        block_size: int = 16,
        max_rows: int = 8,
        max_len: int = 512,
        embeddings: EmbeddingMemory | None = None,
        num_threads: int = 1,
    ) -> None:
        self.config = config
        self.spec = config.kv_cache_spec(block_size)
        self.extent = self.spec.groups[0].extent_bytes(block_size)
        self.per_row = self.spec.num_blocks_for(max_len)
        self.memory = bytearray(b"\xff" * (self.extent * max_rows * self.per_row))  # all NaN
        self.runner = ModelRunner(
            config,
            weights_path,
            self.spec,
            [memoryview(self.memory)],
            embeddings,
            max_rows=max_rows,
            max_model_len=max_len,
            num_threads=num_threads,
        )
        self.steps = 0

    @classmethod
    def of(cls, model_dir: Path, cache_dir: Path, **options: object) -> Driver:
        """A driver of a model directory."""
        return cls(load_config(model_dir), weights.prepare(model_dir, cache_dir), **options)  # type: ignore[arg-type]

    def blocks(self, row: int) -> tuple[int, ...]:
        """The row's block table, deliberately not ascending."""
        return tuple(row * self.per_row + (5 * i + 3) % self.per_row for i in range(self.per_row))

    def new_row(
        self,
        row: int,
        prompt: list[int],
        sampling: SamplingParams = GREEDY,
        *,
        choice: int = 0,
        media: tuple[MediaRows, ...] = (),
    ) -> NewRow:
        return NewRow(row, f"r{row}", choice, tuple(prompt), len(prompt), sampling, media)

    def step(self, **plan: object) -> StepResult:
        self.steps += 1
        return self.runner.execute(StepPlan(self.steps, **plan)).result()  # type: ignore[arg-type]

    def chunk(self, row: int, prompt: list[int], first: int, last: int, *samples: int) -> RowStep:
        """Tokens first .. last of a prompt; the table is sent with the first chunk."""
        table = self.blocks(row) if first == 0 else ()
        return RowStep(row, first, tuple(prompt[first:last]), 0, (table,), samples)

    def prefill(
        self,
        row: int,
        prompt: list[int],
        *,
        chunk: int = 10**6,
        media: tuple[MediaRows, ...] = (),
        sampling: SamplingParams = GREEDY,
    ) -> StepResult:
        """Compute a whole prompt alone, in chunks; returns the result with its first token."""
        for first in range(0, len(prompt), chunk):
            last = min(first + chunk, len(prompt))
            result = self.step(
                new_rows=(self.new_row(row, prompt, sampling, media=media),) if first == 0 else (),
                rows=(self.chunk(row, prompt, first, last, *((row,) if last == len(prompt) else ())),),
            )
        return result

    def decode(self, positions: dict[int, int]) -> StepResult:
        """One decode step of several rows, each computing the KV of its last sampled token."""
        return self.step(
            rows=tuple(
                RowStep(row, position, (LAST_SAMPLED,), 0, ((),), (row,))
                for row, position in positions.items()
            )
        )

    def close(self) -> None:
        self.runner.close()
