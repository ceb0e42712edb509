"""What a worker needs to know of a model, and the runners made for it; one subclass a kind of runner."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from shared.config.services import EncoderConfig, ModelConfig, RuntimeConfig
from shared.engine.encoder_core import MediaPreparer
from shared.errors import ConfigError
from shared.runner.base import EncoderRunner, Runner
from shared.scheduler.scheduler import SchedulerLimits
from shared.types.identity import IdentityKey, LayoutSpec
from shared.types.kv import KVCacheSpec, KVGroupSpec


@dataclass(frozen=True)
class RunnerMemory:
    """Block data of the arenas: one view a KV group, of each tensor-parallel rank in turn, and the ``ec``
    arena's with its rows a block."""

    kv: tuple[memoryview, ...]
    ec: memoryview
    rows_per_block: int


class Backend(ABC):
    """A model as one kind of runner sees it. Building one reads configuration only, never weights.

    ``row_bytes``: bytes of one embedding row, of ``row_dtype``. ``max_model_len`` in tokens. ``tp_size``:
    ranks that share the heads of ``groups``, which are the whole model's.
    """

    identity: IdentityKey
    groups: tuple[KVGroupSpec, ...]
    eos_token_ids: frozenset[int]
    max_model_len: int
    row_bytes: int
    row_dtype: str
    tp_size: int = 1

    def cache_spec(self, block_size: int) -> KVCacheSpec:
        """The KV geometry at this block size."""
        return KVCacheSpec(block_size, self.groups)

    def layout(self, block_size: int) -> LayoutSpec:
        """The layout record that decides pairing."""
        return LayoutSpec(groups=self.groups, block_size=block_size, tp_size=self.tp_size)

    @abstractmethod
    def runner(self, spec: KVCacheSpec, memory: RunnerMemory, limits: SchedulerLimits) -> Runner:
        """Load weights and build the token runner; call before the first request."""

    @abstractmethod
    def encoder_runner(self, memory: RunnerMemory) -> EncoderRunner:
        """Load weights and build the encoder runner. Raises ConfigError for a text-only model."""

    @abstractmethod
    def preparer(self, config: EncoderConfig, event_loop: asyncio.AbstractEventLoop) -> MediaPreparer:
        """Builds what turns raw media into runner input; child processes are driven from the loop."""


def model_name(config: ModelConfig) -> str:
    """The name under which the model is served."""
    return config.name or Path(config.path).resolve().name


def load_backend(config: ModelConfig, runtime: RuntimeConfig) -> Backend:
    """Choose by ``runner``, or by the directory's model type. Torch is imported only for its own kind.
    Raises ConfigError with what is wrong with the directory."""
    kind = config.runner
    if kind == "auto":
        try:
            raw = json.loads((Path(config.path) / "config.json").read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError("the model directory has no readable config.json") from error
        kind = "witness" if raw.get("model_type") == "witness" else "torch"
    if kind == "witness":
        from shared.engine.backend_witness import WitnessBackend

        return WitnessBackend(config, runtime.tp_size)
    if runtime.tp_size > 1:
        raise ConfigError(f"runtime.tp_size={runtime.tp_size}: the torch runner has one rank")
    from shared.engine.backend_torch import TorchBackend

    return TorchBackend(config, runtime)
