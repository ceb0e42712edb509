"""The torch model runner: a dense decoder over paged KV memory, one step after the other.

Owns the order of effects inside a step and the thread that computes. Owns no policy: it does what
a plan says. Shapes: T = tokens of a step, R = sampled rows, E = hidden features, V = valid tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from shared.errors import ConfigError
from shared.kernels import library
from shared.kernels.batch import PagedKV
from shared.kernels.checksum import head_checksums
from shared.models import weights
from shared.models.config import ModelConfig
from shared.models.decoder import Decoder
from shared.runner.base import PendingStep, Runner
from shared.runner.input_batch import InputBatch, StepInputs
from shared.runner.kv_tensors import EmbeddingMemory, extent_of, kv_tensor
from shared.sampling.device import sample_batch
from shared.step import BlockSeal, RowStep, StepPlan, StepResult
from shared.types.kv import KVCacheSpec
from shared.types.request import TokenLogprobs


class ModelRunner(Runner):
    """Runs steps in a thread of its own, so that ``execute`` returns at once."""

    def __init__(
        self,
        config: ModelConfig,
        weights_path: Path,
        spec: KVCacheSpec,
        kv_data: Sequence[memoryview],
        embeddings: EmbeddingMemory | None = None,
        *,
        max_rows: int,
        max_model_len: int,
        num_threads: int = 1,
        batch_invariant: bool = False,
    ) -> None:
        """``kv_data`` is one writable view a group, a whole number of extents each; views stay
        exported until ``close``. ``weights_path`` comes from ``weights.prepare``. ``num_threads``
        is set for the whole process.

        Raises ConfigError: memory or weights that do not fit, or ``batch_invariant`` where the
        kernels are not compiled (compiled, results never depend on the batch).
        """
        if library.available():
            library.set_threads(num_threads)
            torch.set_num_threads(1)
        else:
            torch.set_num_threads(num_threads)
        self._steps: _Steps | None = _Steps(
            config, weights_path, spec, kv_data, embeddings, max_rows, max_model_len
        )
        if batch_invariant and not self._steps.batch_invariant:
            raise ConfigError("batch-invariant results need the compiled kernels: install a C compiler")
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="model-runner")

    def execute(self, plan: StepPlan) -> PendingStep:
        if self._steps is None:
            raise RuntimeError("the runner is closed")
        return _Launched(self._executor.submit(self._steps.run, plan))

    def close(self) -> None:
        self._executor.shutdown()
        self._steps = None


class _Launched(PendingStep):
    def __init__(self, future: Future[StepResult]) -> None:
        self._future = future

    def result(self) -> StepResult:
        return self._future.result()


class _Sampled(NamedTuple):
    """The sampled part of a StepResult."""

    rows: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    failed_rows: tuple[int, ...] = ()


class _Steps:
    """What the runner's thread works on. All methods but the constructor run in that thread."""

    def __init__(
        self,
        config: ModelConfig,
        weights_path: Path,
        spec: KVCacheSpec,
        kv_data: Sequence[memoryview],
        embeddings: EmbeddingMemory | None,
        max_rows: int,
        max_model_len: int,
    ) -> None:
        if spec.groups != config.kv_cache_spec(spec.block_size).groups or len(kv_data) != len(spec.groups):
            raise ConfigError("the KV cache spec is not that of the model")
        if max_model_len > config.max_position:
            raise ConfigError(f"max_model_len {max_model_len} exceeds the model's {config.max_position}")
        if embeddings is not None and embeddings.row_bytes != config.embedding_bytes:
            raise ConfigError(f"embedding rows of {embeddings.row_bytes} bytes are not this model's")
        self._spec = spec
        self._batch = InputBatch(
            len(spec.groups),
            max_rows,
            spec.num_blocks_for(max_model_len),
            config.eos_token_ids,
            embeddings.rows_per_block if embeddings else 1,
        )
        self._kv_bytes = [data.cast("B") for data in kv_data]
        self._kv = [
            kv_tensor(data, group, spec.block_size) for data, group in zip(kv_data, spec.groups, strict=True)
        ]
        self._embeddings = None if embeddings is None else embeddings.tensor()
        groups = [
            PagedKV(data, tables, group.window)
            for data, tables, group in zip(self._kv, self._batch.tables_RM, spec.groups, strict=True)
        ]
        self._decoder = Decoder(config, weights.load(weights_path, config), groups)

    @property
    def batch_invariant(self) -> bool:
        return self._decoder.batch_invariant

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """One step, in the plan's order of effects: free, new, copy, compute, sample, seal."""
        for row in plan.free_rows:
            self._batch.free(row)
        for new in plan.new_rows:
            self._batch.add(new)
        for copy in plan.copies:
            self._kv[copy.group][copy.dst].copy_(self._kv[copy.group][copy.src])
        sampled = self._compute(plan.rows) if plan.rows else _Sampled()
        return StepResult(
            plan.step_id,
            sampled.rows,
            sampled.token_ids,
            sampled.logprobs,
            self._seal(plan.seals),
            sampled.failed_rows,
        )

    def _compute(self, steps: Sequence[RowStep]) -> _Sampled:
        inputs = self._batch.prepare(steps)
        x_TE = self._decoder.embed(inputs.token_ids_T)
        if self._embeddings is not None and len(inputs.media_tokens_A):
            x_TE[inputs.media_tokens_A] = self._embeddings[inputs.media_rows_A]
        self._decoder.forward(x_TE, inputs.rows_T, inputs.positions_T, inputs.starts)
        return self._sample(inputs, x_TE) if inputs.sample_rows else _Sampled()

    def _sample(self, inputs: StepInputs, hidden_TE: torch.Tensor) -> _Sampled:
        rows = inputs.sample_rows
        # Choices of one request share the logits of their prompt's last position.
        tokens = sorted(set(inputs.sampled_from))
        logits_RV = self._decoder.logits(hidden_TE[tokens])
        if len(tokens) < len(rows):
            place = {token: i for i, token in enumerate(tokens)}
            logits_RV = logits_RV[[place[token] for token in inputs.sampled_from]]
        samples = sample_batch(logits_RV, self._batch.sampler_rows(rows))
        good = [i for i in range(len(rows)) if i not in samples.failed]
        for i in good:
            self._batch.append(rows[i], samples.token_ids[i])
        return _Sampled(
            tuple(rows[i] for i in good),
            tuple(samples.token_ids[i] for i in good),
            tuple(samples.logprobs[i] for i in good),
            tuple(rows[i] for i in samples.failed),
        )

    def _seal(self, seals: Sequence[BlockSeal]) -> tuple[tuple[int, ...], ...]:
        return tuple(self._checksums(seal) for seal in seals)

    def _checksums(self, seal: BlockSeal) -> tuple[int, ...]:
        group = self._spec.groups[seal.group]
        extent = group.extent_bytes(self._spec.block_size)
        data = extent_of(self._kv_bytes[seal.group], seal.block_id, extent)
        return head_checksums(data, group.num_kv_heads)
