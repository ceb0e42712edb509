"""A checkpoint of a supported family as a backend; the only module of the engine that knows torch."""

from __future__ import annotations

import asyncio
from pathlib import Path

from shared.config.services import EncoderConfig, ModelConfig, RuntimeConfig
from shared.engine.backend import Backend, RunnerMemory, model_name
from shared.engine.encoder_core import MediaPreparer
from shared.engine.media import PixelMedia
from shared.models import weights
from shared.models.registry import load_config
from shared.registry.identity import identity_of
from shared.runner.encoder_runner import VisionEncoderRunner
from shared.runner.kv_tensors import EmbeddingMemory
from shared.runner.model_runner import ModelRunner
from shared.scheduler.scheduler import SchedulerLimits
from shared.types.kv import KVCacheSpec

#: The block size is the scheduler's choice; groups do not depend on it.
_ANY_BLOCK_SIZE = 16


class TorchBackend(Backend):
    """See ``shared.models.registry`` for the families. Weights are prepared once, in ``cache_dir``
    (default: beside the model), and mapped by every process."""

    def __init__(self, config: ModelConfig, runtime: RuntimeConfig) -> None:
        self._path = Path(config.path)
        self._runtime = runtime
        self._cache_dir = Path(config.cache_dir) if config.cache_dir else self._path / ".triptych"
        self._model = load_config(self._path)
        self._int8 = config.quantization == "int8"
        marks = [config.dtype, *["int8"] * self._int8, *["invariant"] * runtime.batch_invariant]
        numerics = "-".join(marks)
        self.identity = identity_of(self._path, model_name(config), config.dtype, numerics)
        self.groups = self._model.kv_cache_spec(_ANY_BLOCK_SIZE).groups
        self.eos_token_ids = frozenset(self._model.eos_token_ids)
        self.max_model_len = self._model.max_position
        self.row_bytes = self._model.embedding_bytes
        self.row_dtype = config.dtype

    def runner(self, spec: KVCacheSpec, memory: RunnerMemory, limits: SchedulerLimits) -> ModelRunner:
        return ModelRunner(
            self._model,
            weights.prepare(self._path, self._cache_dir, int8=self._int8),
            spec,
            memory.kv,
            EmbeddingMemory(memory.ec, memory.rows_per_block, self.row_bytes),
            max_rows=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            num_threads=self._runtime.num_threads,
            batch_invariant=self._runtime.batch_invariant,
        )

    def encoder_runner(self, memory: RunnerMemory) -> VisionEncoderRunner:
        embeddings = EmbeddingMemory(memory.ec, memory.rows_per_block, self.row_bytes)
        return VisionEncoderRunner(self._path, embeddings, num_threads=self._runtime.num_threads)

    def preparer(self, config: EncoderConfig, event_loop: asyncio.AbstractEventLoop) -> MediaPreparer:
        return PixelMedia(self._path, config, event_loop)
