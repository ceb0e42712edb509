"""The shipped configurations: sound defaults, frozen, and safe by default."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from shared.config.load import dump, load, write
from shared.config.services import ModelConfig, RouterConfig, StoreConfig, WorkerConfig
from shared.errors import ConfigError

MINIMAL: dict[type[Any], list[str]] = {
    RouterConfig: ["model.path=m"],
    WorkerConfig: ["model.path=m", "worker_id=w", "kind=decode"],
    StoreConfig: ["model.path=m"],
}


def leaves(data: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


@pytest.mark.parametrize("cls", MINIMAL)
def test_defaults_pass_their_own_checks(cls: type[Any], tmp_path: Path) -> None:
    config = load(cls, overrides=MINIMAL[cls])
    write(config, tmp_path / "c.yaml")
    assert load(cls, file=tmp_path / "c.yaml") == config


@pytest.mark.parametrize("cls", MINIMAL)
def test_nothing_listens_beyond_this_host_by_default(cls: type[Any]) -> None:
    config = dump(load(cls, overrides=MINIMAL[cls]))
    hosts = [value for key, value in leaves(config) if key.endswith("host")]
    assert hosts and set(hosts) == {"127.0.0.1"}


@pytest.mark.parametrize("cls", MINIMAL)
def test_sections_are_frozen(cls: type[Any]) -> None:
    config = load(cls, overrides=MINIMAL[cls])
    for section in [config, *(v for f in fields(config) if is_dataclass(v := getattr(config, f.name)))]:
        with pytest.raises(FrozenInstanceError):
            setattr(section, fields(section)[0].name, None)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("registry.kind=redis", "registry: kind redis needs redis_url"),
        ("registry.ttl_s=0.5", "registry: ttl_s must be longer than heartbeat_s"),
        ("routing.lost_s=1", "routing: lost_s and stall_s must not be shorter than suspect_s"),
        ("transfer.order=shm,zzz", "transfer.order: expected one of shm, tcp, nixl, mooncake"),
        ("transfer.order=", "transfer: order must name at least one backend"),
        ("server.port=65536", "server.port: must be at most 65535"),
        ("server.port=8000", "RouterConfig: http.port and server.port must differ"),
        ("server.metrics_port=8000", "RouterConfig: http.port and server.metrics_port must differ"),
    ],
)
def test_contradictions_are_problems(override: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(RouterConfig, overrides=["model.path=m", override])
    assert str(error.value).splitlines()[1:] == [f"  {problem}"]


def test_failpoints_are_off_by_default() -> None:
    assert load(WorkerConfig, overrides=MINIMAL[WorkerConfig]).runtime.failpoints == ""


def test_a_config_can_be_built_in_code() -> None:
    config = WorkerConfig(model=ModelConfig("m"), worker_id="w", kind="prefill")
    assert config.kv.block_size == 16


def test_the_two_ports_of_a_section_must_differ_too() -> None:
    overrides = ["model.path=m", "server.port=9000", "server.metrics_port=9000"]
    with pytest.raises(ConfigError, match=r"server\.port and server\.metrics_port must differ"):
        load(RouterConfig, overrides=overrides)


@pytest.mark.parametrize(
    "overrides", [["http.port=0", "server.port=0"], ["server.port=8000", "server.host=127.0.0.2"]]
)
def test_any_port_and_one_port_of_two_addresses_are_no_contradiction(overrides: list[str]) -> None:
    load(RouterConfig, overrides=["model.path=m", *overrides])


def test_one_key_of_a_section_leaves_its_neighbours_as_they_stand_there() -> None:
    config = load(RouterConfig, overrides=["model.path=m", "server.metrics_port=9102"])
    assert (config.server.port, config.server.metrics_port) == (8001, 9102)
