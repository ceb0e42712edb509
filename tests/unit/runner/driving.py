"""Drives a model runner by hand-made plans: what a scheduler would say, in the simplest order."""

from __future__ import annotations

from pathlib import Path

import torch

from shared.models import weights
from shared.models.config import ModelConfig
from shared.models.registry import load_config
from shared.models.tensor_file import write_tensors
from shared.runner.base import Runner
from shared.runner.kv_tensors import EmbeddingMemory, kv_tensor
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
        self.runner = self.make_runner(
            weights_path, embeddings, max_rows=max_rows, max_model_len=max_len, num_threads=num_threads
        )
        self.steps = 0

    def make_runner(
        self, weights_path: Path, embeddings: EmbeddingMemory | None, *, num_threads: int, **limits: int
    ) -> Runner:
        memory = [memoryview(self.memory)]
        return ModelRunner(
            self.config, weights_path, self.spec, memory, embeddings, num_threads=num_threads, **limits
        )

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


class GpuDriver(Driver):
    """The same over a GPU's runner: on the GPU, or, its kernels interpreted, over the memory of the CPU."""

    def make_runner(
        self, weights_path: Path, embeddings: EmbeddingMemory | None, *, num_threads: int, **limits: int
    ) -> Runner:
        from shared.models.gpu_decoder import place
        from shared.runner.gpu.device import CudaDevice, HostDevice
        from shared.runner.gpu.runner import GpuRunner

        device = CudaDevice() if torch.cuda.is_available() else HostDevice()
        kv = [kv_tensor(memoryview(self.memory), self.spec.groups[0], self.spec.block_size).to(device.device)]
        placed = place(weights.load(weights_path, self.config), device.device, torch.float32)
        return GpuRunner(self.config, placed, self.spec, kv, device, embeddings, **limits)


def random_weights(config: ModelConfig, path: Path) -> Path:
    """Prepared weights of a tied model without biases, drawn from torch's generator; written to ``path``."""
    e, i, d = config.hidden_size, config.intermediate_size, config.head_dim
    width, q = (config.num_heads + 2 * config.num_kv_heads) * d, config.num_heads * d
    shapes = {"qkv": (width, e), "o": (e, q), "gate_up": (2 * i, e), "down": (e, i)}
    shapes |= {"embed": (config.vocab_size, e), "q_norm": (d,), "k_norm": (d,)}
    tensors = {}
    for name, _ in weights._sources(config):
        shape = shapes.get(name.split(".")[-1], (e,))
        scale = 1.0 if len(shape) == 1 else 0.5
        tensors[name] = (torch.float32, [torch.randn(shape) * scale])
    write_tensors(path, tensors)
    return path
