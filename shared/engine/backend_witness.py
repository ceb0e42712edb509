"""The witness model as a backend: digests instead of weights, raw media instead of pixels."""

from __future__ import annotations

import asyncio
from pathlib import Path

from shared.config.services import EncoderConfig, ModelConfig
from shared.engine.backend import Backend, RunnerMemory, model_name
from shared.engine.encoder_core import MediaPreparer
from shared.engine.media import RawMedia
from shared.errors import ConfigError
from shared.registry.identity import identity_of
from shared.runner.witness.encoder import WitnessEncoderRunner
from shared.runner.witness.runner import WitnessRunner
from shared.runner.witness_config import load_witness_config
from shared.scheduler.scheduler import SchedulerLimits
from shared.types.kv import KVCacheSpec, KVGroupSpec


class WitnessBackend(Backend):
    """See ``shared.runner.witness_config`` for what the model is."""

    def __init__(self, config: ModelConfig, tp_size: int = 1) -> None:
        self._path = Path(config.path)
        self._witness = load_witness_config(self._path)
        self.identity = identity_of(self._path, model_name(config), "uint64", "exact")
        self.groups = (KVGroupSpec(self._witness.num_layers, self._witness.num_kv_heads, 1, "uint64"),)
        self.tp_size = tp_size
        if self._witness.num_kv_heads % tp_size:
            raise ConfigError(
                f"runtime.tp_size={tp_size} does not divide the model's {self._witness.num_kv_heads} kv_heads"
            )
        self.eos_token_ids = frozenset({self._witness.eos_token_id})
        self.max_model_len = self._witness.max_position_embeddings
        self.row_bytes = self._witness.row_bytes
        self.row_dtype = "uint64"

    def runner(self, spec: KVCacheSpec, memory: RunnerMemory, limits: SchedulerLimits) -> WitnessRunner:
        return WitnessRunner(
            self._witness,
            spec,
            memory.kv,
            ec_data=memory.ec,
            rows_per_block=memory.rows_per_block,
            tp_size=self.tp_size,
        )

    def encoder_runner(self, memory: RunnerMemory) -> WitnessEncoderRunner:
        return WitnessEncoderRunner(self._witness, memory.ec, memory.rows_per_block)

    def preparer(self, config: EncoderConfig, event_loop: asyncio.AbstractEventLoop) -> MediaPreparer:
        return RawMedia(self._path, config)
