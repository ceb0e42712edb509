"""What cannot work is known from the plan alone; what works otherwise than asked for is said."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from services.cli.preflight import check, read_model
from services.cli.topology import LaunchOptions, ProcessSpec, PublicPorts, Topology, plan
from shared.config.services import ModelConfig
from shared.errors import ConfigError
from tests.unit.cli.helpers import WITNESS

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}


def planned(*overrides: str, model: Path = WITNESS, topology: str = "") -> tuple[ProcessSpec, ...]:
    options = LaunchOptions(ModelConfig(str(model)), PublicPorts(1, 2, 3), overrides=overrides)
    return plan(Topology.parse(topology), options, itertools.count(20_000))


def problems(*overrides: str, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check(planned(*overrides, **kwargs))
    return caught.value.message


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_a_plan_that_works_leaves_nothing_to_say() -> None:
    assert check(planned()) == ()


def test_workers_with_the_same_shorter_context_are_said_together() -> None:
    assert check(planned("workers:kv.num_blocks=5", "decode-1:kv.num_blocks=9")) == (
        "kv.num_blocks=5 holds 64 tokens: served context 64 instead of 2048 (prefill-0, decode-0)",
        "kv.num_blocks=9 holds 128 tokens: served context 128 instead of 2048 (decode-1)",
    )


def test_everything_that_cannot_work_is_listed_at_once() -> None:
    message = problems(
        "decode:kv.num_blocks=1",
        "encoder:encoder.rows_per_block=4096",
        "encoder:encoder.memory_mb=1",
        "kv_store:server.port=1",
        model=WITNESS,
    )
    assert "decode-0: kv.num_blocks=1" in message and "decode-1: kv.num_blocks=1" in message
    assert "port 1 is given to --http-port and kv-store-0's gRPC port" in message


def test_a_store_without_memory_for_a_block_is_refused(llama: Path) -> None:
    wide = {**LLAMA, "num_hidden_layers": 64, "num_key_value_heads": 4, "head_dim": 128}
    (llama / "config.json").write_text(json.dumps(wide))
    message = problems("kv_store:kv.memory_mb=1", model=llama, topology="e=0")
    assert "kv-store-0: kv.memory_mb=1 holds no block" in message and "decode-0" not in message


def test_a_model_that_reads_no_pictures_gets_no_encoder(llama: Path) -> None:
    assert not read_model(ModelConfig(str(llama))).sees and read_model(ModelConfig(str(WITNESS))).sees
    assert "encoder-0: the model reads no pictures" in problems(model=llama)
    assert check(planned(model=llama, topology="e=0")) == ()


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"model_type": "llama"}', json.dumps({**LLAMA, "hidden_size": "x"})]
)
def test_a_model_directory_without_sense_is_named_once(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    message = problems(model=tmp_path, topology="e=0")
    assert message.count(f"model {tmp_path}: ") == 1


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_a_backend_must_be_installed_to_be_used(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert f"kv-store-0: transfer.order: {backend} is not installed" in problems(f"transfer.order={backend}")


def test_a_disk_tier_needs_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    assert "kv-store-0: disk.path: " in problems(f"disk.path={tmp_path}/file")
    assert f"{tmp_path}/file is not a directory" in problems(f"disk.path={tmp_path}/file/below")
    wanted = f"disk.path={tmp_path}/new/folder"
    assert check(planned(wanted)) == () and not (tmp_path / "new").exists()
    both = problems(wanted, topology="s=2")
    assert f"{tmp_path}/new/folder is given to kv-store-0 and kv-store-1; each needs its own" in both
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    assert f"{tmp_path} is not writable" in problems(wanted)


def test_tiers_from_outside_are_looked_for_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outside" / "below").mkdir(parents=True)
    for folder in ("outside", "outside/below"):
        (tmp_path / folder / "__init__.py").write_text("raise SystemExit('it was run')")
    (tmp_path / "outside" / "below" / "tier.py").write_text("raise SystemExit('it was run')")
    monkeypatch.chdir(tmp_path)
    assert check(planned("tiers=outside.below.tier:Some?a=1")) == ()
    assert check(planned("tiers=shared.tiering.mooncake:MooncakeTier")) == ()
    assert "kv-store-0: tiers: there is no module nosuch" in problems("tiers=nosuch:Foo")
    assert "there is no module outside.nosuch" in problems("tiers=outside.nosuch:Foo")
    assert "expected package.module:Class" in problems("tiers=outside")


def test_the_environment_counts_too() -> None:
    with pytest.raises(ConfigError, match=r"telemetry\.log_level"):
        check(planned(), {"TRIPTYCH_TELEMETRY__LOG_LEVEL": "loud"})
    with pytest.raises(ConfigError, match="unknown key"):
        check(planned(), {"TRIPTYCH_TELEMETRY__LOUD": "1"})
    check(planned(), {"TRIPTYCH_KV__BLOCK_SIZE": "32", "TRIPTYCH_HTTP__MAX_CONNECTIONS": "9"})
