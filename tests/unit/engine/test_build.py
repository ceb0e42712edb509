"""A worker refuses memory that cannot serve, and says in its log when it serves less than was asked for."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from shared.clock import ManualClock, SystemEntropy
from shared.config.services import EncoderConfig, KVConfig, ModelConfig, RuntimeConfig, WorkerConfig
from shared.engine.backend import load_backend
from shared.engine.build import Environment, build_token_engine, max_model_len
from shared.engine.memory import make_ec_arena
from shared.errors import ConfigError
from shared.failpoints import Failpoints
from shared.telemetry.tracing import Tracer, build_tracer


@pytest.fixture
def tracer() -> Tracer:
    return build_tracer("tests", "", pid=1)


def build(root: Path, tracer: Tracer, **sections: Any) -> WorkerConfig:
    """Build a decode worker's engine with the witness, and let go of it."""
    config = WorkerConfig(ModelConfig(str(root / "models" / "witness")), "decode-0", "decode", **sections)
    backend = load_backend(config.model, RuntimeConfig())
    environment = Environment(ManualClock(), SystemEntropy(), Failpoints.parse(""), tracer, "0" * 32)
    engine = build_token_engine(config, backend, environment, None, lambda error: None)
    for arena in engine.arenas.values():
        arena.close()
    return config


def test_a_context_shorter_than_wanted_is_in_the_log(
    repo_root: Path, tracer: Tracer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    config = build(repo_root, tracer, kv=KVConfig(num_blocks=5))
    assert max_model_len(config, load_backend(config.model, RuntimeConfig())) == 64
    [record] = [found for found in caplog.records if "context" in found.getMessage()]
    fields = json.dumps(record.__dict__, default=str)
    assert "kv.num_blocks=5" in fields and "64" in fields and "2048" in fields


def test_enough_memory_is_no_news(repo_root: Path, tracer: Tracer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    build(repo_root, tracer, kv=KVConfig(num_blocks=129))
    assert caplog.records == []


def test_a_cache_without_room_for_a_sequence_is_refused(repo_root: Path, tracer: Tracer) -> None:
    with pytest.raises(ConfigError, match=r"kv.num_blocks=1 "):
        build(repo_root, tracer, kv=KVConfig(num_blocks=1))


def test_memory_for_no_block_of_embeddings_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"encoder.memory_mb=1"):
        make_ec_arena(EncoderConfig(memory_mb=1, rows_per_block=4096), 4096, "0" * 32)
