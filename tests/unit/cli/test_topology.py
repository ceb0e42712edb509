"""A plan is plain data: who is started, where it listens, and with which configuration."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from services.cli.topology import LaunchOptions, ProcessSpec, PublicPorts, Topology, plan
from shared.config.load import load, write
from shared.config.services import ModelConfig, RouterConfig, StoreConfig, WorkerConfig
from shared.errors import ConfigError

MODEL = ModelConfig(path="/models/tiny")


def _plan(text: str = "", *overrides: str, cores: int = 2) -> dict[str, ProcessSpec]:
    options = LaunchOptions(model=MODEL, ports=PublicPorts(1, 2, 3), overrides=overrides, num_cores=cores)
    return {spec.name: spec for spec in plan(Topology.parse(text), options, itertools.count(20_000))}


def test_the_default_is_six_processes_router_first() -> None:
    assert list(_plan()) == ["router", "kv-store-0", "encoder-0", "prefill-0", "decode-0", "decode-1"]


@pytest.mark.parametrize("text", ["e=1,p", "x=1", "e=-1", "e=one", "p=0,d=0", "s=65", "d=65", "d=1,d=2"])
def test_a_bad_topology_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Topology.parse(text)


def test_a_topology_may_lack_phases_and_the_router_does_not_wait_for_them() -> None:
    specs = _plan("e=0,p=0,d=1,s=0")
    assert list(specs) == ["router", "decode-0"]
    decode, router = specs["decode-0"].config, specs["router"].config
    assert isinstance(decode, WorkerConfig) and decode.kv_stores == ()
    assert isinstance(router, RouterConfig) and router.routing.phases == ("decode",)
    whole = _plan()["router"].config
    assert isinstance(whole, RouterConfig) and whole.routing.phases == ("encoder", "prefill", "decode")


def test_workers_know_the_router_and_every_store() -> None:
    specs = _plan("s=2")
    assert list(specs)[:3] == ["router", "kv-store-0", "kv-store-1"]
    stores = tuple(specs[f"kv-store-{n}"].grpc_address for n in range(2))
    for spec in specs.values():
        if isinstance(spec.config, WorkerConfig | StoreConfig):
            assert spec.config.routers == ("127.0.0.1:2",)
        if isinstance(spec.config, WorkerConfig):
            assert spec.config.kv_stores == stores


def test_every_process_has_ports_of_its_own_on_loopback() -> None:
    specs = _plan("e=3,p=3,d=3").values()
    addresses = [address for spec in specs for address in (spec.grpc_address, spec.metrics_address)]
    assert len(set(addresses)) == len(addresses)
    assert all(address.startswith("127.0.0.1:") for address in addresses)


def test_the_router_takes_the_public_ports() -> None:
    router = _plan()["router"].config
    assert isinstance(router, RouterConfig)
    assert (router.http.port, router.server.port, router.server.metrics_port) == (1, 2, 3)


def test_a_configuration_file_reads_back_as_it_was_planned(tmp_path: Path) -> None:
    for spec in _plan().values():
        write(spec.config, tmp_path / "config.yaml")
        assert load(type(spec.config), file=tmp_path / "config.yaml") == spec.config


def test_the_command_line_names_service_and_configuration() -> None:
    argv = _plan()["kv-store-0"].argv(Path("c.yaml"))
    assert argv[1:] == ["-m", "services.kv_store", "--config", "c.yaml"]


def test_thread_counts_and_waiting_stand_in_the_environment() -> None:
    specs = _plan("", "decode-1:runtime.num_threads=3", cores=4)
    threads = {name: spec.environment({})["OMP_NUM_THREADS"] for name, spec in specs.items()}
    assert threads == {
        "router": "1",
        "kv-store-0": "1",
        "encoder-0": "4",
        "prefill-0": "4",
        "decode-0": "2",
        "decode-1": "3",
    }
    environment = specs["prefill-0"].environment({"HOME": "h", "OMP_WAIT_POLICY": "active"})
    assert environment["OMP_WAIT_POLICY"] == "passive" and environment["HOME"] == "h"


def test_an_override_reaches_every_process_that_has_the_key() -> None:
    specs = _plan("", "kv.block_size=8")
    assert {s.config.kv.block_size for s in specs.values() if not isinstance(s.config, RouterConfig)} == {8}


def test_an_override_may_be_for_a_kind_a_name_or_all_workers() -> None:
    specs = _plan("", "decode:kv.num_blocks=5", "decode-1:kv.num_blocks=6", "workers:transfer.lease_s=1")
    blocks = {n: s.config.kv.num_blocks for n, s in specs.items() if not isinstance(s.config, RouterConfig)}
    assert blocks == {"kv-store-0": 0, "encoder-0": 0, "prefill-0": 0, "decode-0": 5, "decode-1": 6}
    assert {s.config.transfer.lease_s for n, s in specs.items() if n != "router"} == {1.0}
    assert specs["router"].config.transfer.lease_s != 1.0


def test_all_bad_overrides_are_listed_at_once() -> None:
    bad = (
        "kv.block_size=none",
        "kv.nothing=1",
        "nobody:kv.num_blocks=1",
        "kv",
        "limits.max_running=0",
        "kv=1",
    )
    with pytest.raises(ConfigError) as caught:
        _plan("", *bad)
    for text in ("kv.block_size", "kv.nothing=1", "nobody", "--set kv:", "limits.max_running", "--set kv=1"):
        assert text in caught.value.message
