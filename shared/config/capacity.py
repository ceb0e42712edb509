"""What the configured memory holds: KV blocks, the context that they serve, and blocks of embeddings.

Arithmetic only. Workers allocate by it, and the launcher says by it before a start what a worker would find.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.services import EncoderConfig, KVConfig, WorkerConfig
from shared.errors import ConfigError
from shared.types.kv import KVCacheSpec


@dataclass(frozen=True)
class Context:
    """The longest sequence in tokens: ``wanted`` by model and configuration, ``room`` for it in the KV
    cache, whose size ``source`` names as it was configured."""

    wanted: int
    room: int
    source: str

    @property
    def served(self) -> int:
        return min(self.wanted, self.room)

    @property
    def shortfall(self) -> str:
        """In words, what is served instead of what was wanted; empty when it is the same."""
        if self.room >= self.wanted:
            return ""
        return f"{self.source} holds {self.room} tokens: served context {self.room} instead of {self.wanted}"


def kv_blocks(config: KVConfig, spec: KVCacheSpec) -> int:
    """Blocks of each group: as configured, or as many as the memory holds. Raises ConfigError for none."""
    if config.num_blocks:
        return config.num_blocks
    extent = sum(group.extent_bytes(spec.block_size) for group in spec.groups)
    num_blocks = (config.memory_mb << 20) // extent
    if num_blocks < 1:
        raise ConfigError(f"{_source(config)} holds no block of {spec.block_size} tokens ({extent} bytes)")
    return num_blocks


def context(config: WorkerConfig, spec: KVCacheSpec, longest: int) -> Context:
    """The context of a prefill or decode worker for a model of ``longest`` tokens. One block is a spare, for
    a copy: a sequence that needed all of them could not even go on alone. Raises ConfigError when the KV
    cache has no other."""
    room = (kv_blocks(config.kv, spec) - 1) * spec.block_size
    if room < 1:
        raise ConfigError(f"{_source(config.kv)} holds one block of {spec.block_size} tokens; 2 are needed")
    return Context(min(config.scheduler.max_model_len or longest, longest), room, _source(config.kv))


def embedding_blocks(config: EncoderConfig, row_bytes: int) -> int:
    """Blocks of ``rows_per_block`` embedding rows that the memory holds. Raises ConfigError for none."""
    extent = config.rows_per_block * row_bytes
    num_blocks = (config.memory_mb << 20) // extent
    if num_blocks < 1:
        raise ConfigError(
            f"encoder.memory_mb={config.memory_mb} holds no block of "
            f"encoder.rows_per_block={config.rows_per_block} rows ({extent} bytes)"
        )
    return num_blocks


def _source(config: KVConfig) -> str:
    return f"kv.num_blocks={config.num_blocks}" if config.num_blocks else f"kv.memory_mb={config.memory_mb}"
