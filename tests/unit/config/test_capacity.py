"""What memory holds is counted in whole blocks, a shorter context is said, and too little is refused."""

from __future__ import annotations

import pytest

from shared.config.capacity import context, embedding_blocks, kv_blocks
from shared.config.services import EncoderConfig, KVConfig, ModelConfig, SchedulerConfig, WorkerConfig
from shared.errors import ConfigError
from shared.types.kv import KVCacheSpec, KVGroupSpec

#: 64 KiB a block of 16 tokens: 16 blocks a MiB.
SPEC = KVCacheSpec(16, (KVGroupSpec(num_layers=4, num_kv_heads=2, head_dim=64, dtype="float32"),))
SPEC_OF_MIBS = KVCacheSpec(256, (KVGroupSpec(num_layers=8, num_kv_heads=8, head_dim=64, dtype="float32"),))


def worker(kv: KVConfig, max_model_len: int = 2048) -> WorkerConfig:
    scheduler = SchedulerConfig(max_model_len=max_model_len)
    return WorkerConfig(ModelConfig("m"), "w", "decode", kv=kv, scheduler=scheduler)


def test_blocks_are_as_configured_or_as_many_as_the_memory_holds() -> None:
    assert kv_blocks(KVConfig(memory_mb=2), SPEC) == 32
    assert kv_blocks(KVConfig(memory_mb=2, num_blocks=7), SPEC) == 7


def test_memory_for_no_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv.memory_mb=1 holds no block of 256 tokens"):
        kv_blocks(KVConfig(memory_mb=1), SPEC_OF_MIBS)


def test_a_context_that_fits_is_served_whole_and_nothing_is_said() -> None:
    found = context(worker(KVConfig(num_blocks=129)), SPEC, 8192)
    assert (found.served, found.shortfall) == (2048, "")
    assert context(worker(KVConfig(num_blocks=1000), max_model_len=0), SPEC, 8192).served == 8192
    assert context(worker(KVConfig(num_blocks=1000)), SPEC, 512).served == 512


def test_a_shorter_context_names_what_made_it_so() -> None:
    found = context(worker(KVConfig(memory_mb=1)), SPEC, 8192)
    assert found.served == 15 * 16
    assert found.shortfall == "kv.memory_mb=1 holds 240 tokens: served context 240 instead of 2048"
    assert context(worker(KVConfig(num_blocks=128)), SPEC, 8192).shortfall.startswith("kv.num_blocks=128 ")


def test_a_cache_of_one_block_serves_nothing() -> None:
    assert context(worker(KVConfig(num_blocks=2)), SPEC, 8192).served == 16
    with pytest.raises(ConfigError, match=r"kv.num_blocks=1 holds one block"):
        context(worker(KVConfig(num_blocks=1)), SPEC, 8192)


def test_embeddings_are_counted_in_whole_blocks() -> None:
    assert embedding_blocks(EncoderConfig(memory_mb=1, rows_per_block=16), 4096) == 16
    with pytest.raises(ConfigError, match=r"encoder.memory_mb=1 .* encoder.rows_per_block=4096"):
        embedding_blocks(EncoderConfig(memory_mb=1, rows_per_block=4096), 4096)
