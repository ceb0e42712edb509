"""What a deployment on one machine consists of, as plain data: topology in, process specifications out.

Owns names, kinds, counts, addresses and the configuration of each process. Pure: starts nothing, opens
nothing, reads no clock.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from services.cli.ports import HOST, PublicPorts
from shared.config.convert import build
from shared.config.load import dump
from shared.config.services import (
    HttpConfig,
    KVConfig,
    ModelConfig,
    RouterConfig,
    RoutingConfig,
    RuntimeConfig,
    ServerConfig,
    StoreConfig,
    TelemetryConfig,
    WorkerConfig,
)
from shared.errors import ConfigError

ServiceConfig = RouterConfig | WorkerConfig | StoreConfig

_LETTERS = {"e": "encoders", "p": "prefills", "d": "decodes", "s": "kv_stores"}


@dataclass(frozen=True)
class Topology:
    """How many workers of each kind stand behind the one router."""

    encoders: int = 1
    prefills: int = 1
    decodes: int = 2
    kv_stores: int = 1

    @classmethod
    def parse(cls, text: str, usual: Topology | None = None) -> Topology:
        """From "e=1,p=1,d=2,s=1"; what is not named is as in ``usual``. Raises ConfigError."""
        counts: dict[str, int] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            letter, _, count = part.partition("=")
            if letter not in _LETTERS or not count.isdecimal() or int(count) > 64:
                raise ConfigError(f"topology {part!r}: expected e=, p=, d= or s= and a number up to 64")
            if _LETTERS[letter] in counts:
                raise ConfigError(f"topology {text!r}: {letter}= is given twice")
            counts[_LETTERS[letter]] = int(count)
        topology = replace(usual or cls(), **counts)
        if topology.prefills + topology.decodes == 0:
            raise ConfigError("topology: nothing would generate tokens; give p= or d= at least 1")
        return topology

    @property
    def num_workers(self) -> int:
        """Processes that announce themselves to the router."""
        return self.encoders + self.prefills + self.decodes + self.kv_stores

    @property
    def phases(self) -> dict[Literal["encoder", "prefill", "decode"], int]:
        """How many workers of each kind that serves a phase, none included."""
        return {"encoder": self.encoders, "prefill": self.prefills, "decode": self.decodes}


@dataclass(frozen=True)
class LaunchOptions:
    """Everything a plan depends on besides the topology.

    ``overrides`` are "key=value" (every process that has the key) or "who:key=value", where ``who`` is a
    process name (decode-1), a kind (decode) or "workers". ``num_cores`` bounds thread counts. ``keeper``:
    the address of who holds the KV memory of workers that die ("": nobody).
    """

    model: ModelConfig
    ports: PublicPorts = field(default_factory=PublicPorts)
    otlp_endpoint: str = ""
    overrides: tuple[str, ...] = ()
    num_cores: int = 2
    keeper: str = ""


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start: its name, its kind (the service folder) and its finished configuration."""

    name: str
    kind: str
    config: ServiceConfig

    @property
    def grpc_address(self) -> str:
        return f"{self.config.server.host}:{self.config.server.port}"

    @property
    def metrics_address(self) -> str:
        return f"{self.config.server.metrics_host}:{self.config.server.metrics_port}"

    def argv(self, config_file: Path) -> list[str]:
        """The command line that starts it."""
        return [sys.executable, "-m", f"services.{self.kind}", "--config", str(config_file)]

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """``base`` with thread counts set: they must stand before the child imports torch."""
        threads = str(self.config.runtime.num_threads)
        return {
            **base,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        }


def plan(
    topology: Topology, options: LaunchOptions, internal_ports: Iterator[int]
) -> tuple[ProcessSpec, ...]:
    """The processes of a deployment, router first, in the order in which they are started.

    Takes two ports of ``internal_ports`` for each process but the router. Raises ConfigError for public ports
    that are equal, and one that lists every override that fits nothing or has a bad value.
    """
    telemetry = TelemetryConfig(otlp_endpoint=options.otlp_endpoint)
    ports = options.ports
    ports.check()
    router = RouterConfig(
        model=options.model,
        http=HttpConfig(host=HOST, port=ports.http),
        server=ServerConfig(host=HOST, port=ports.grpc, metrics_host=HOST, metrics_port=ports.metrics),
        routing=RoutingConfig(phases=tuple(kind for kind, count in topology.phases.items() if count)),
        telemetry=telemetry,
    )
    routers = (f"{HOST}:{ports.grpc}",)
    specs = [ProcessSpec("router", "router", router)]
    for index in range(topology.kv_stores):
        store = StoreConfig(
            model=options.model,
            worker_id=f"kv-store-{index}",
            routers=routers,
            server=_internal_server(internal_ports),
            telemetry=telemetry,
        )
        specs.append(ProcessSpec(store.worker_id, "kv_store", store))
    kv_stores = tuple(spec.grpc_address for spec in specs[1:])
    for kind, count in topology.phases.items():
        for index in range(count):
            worker = WorkerConfig(
                model=options.model,
                worker_id=f"{kind}-{index}",
                kind=kind,
                routers=routers,
                kv_stores=kv_stores,
                server=_internal_server(internal_ports),
                telemetry=telemetry,
                kv=KVConfig(keeper="" if kind == "encoder" else options.keeper),
                runtime=RuntimeConfig(num_threads=_threads(kind, topology, options.num_cores)),
            )
            specs.append(ProcessSpec(worker.worker_id, kind, worker))
    return _overridden(specs, options.overrides)


def _internal_server(ports: Iterator[int]) -> ServerConfig:
    return ServerConfig(host=HOST, port=next(ports), metrics_host=HOST, metrics_port=next(ports))


def _threads(kind: str, topology: Topology, num_cores: int) -> int:
    """Encode and prefill are bound by arithmetic and rarely overlap; decode is bound by memory."""
    share = num_cores if kind in {"encoder", "prefill"} else num_cores // max(1, topology.decodes)
    return max(1, min(4, share))


def _overridden(specs: Sequence[ProcessSpec], overrides: Sequence[str]) -> tuple[ProcessSpec, ...]:
    """The specifications with every override applied. Raises ConfigError listing all that is wrong."""
    data = {spec.name: dump(spec.config) for spec in specs}
    problems: list[str] = []
    for text in overrides:
        assignment, equals, value = text.partition("=")
        who, colon, key = assignment.rpartition(":")
        if not equals or not key or (colon and not who):
            problems.append(f"--set {text}: expected [who:]section.key=value")
            continue
        addressed = [spec for spec in specs if not who or _is_addressed(spec, who)]
        if not addressed:
            known = ", ".join(dict.fromkeys(name for spec in specs for name in (spec.name, spec.kind)))
            problems.append(f"--set {text}: there is no process or kind {who!r} (but {known}, workers)")
        elif not [spec for spec in addressed if _put(data[spec.name], key.split("."), value)]:
            problems.append(f"--set {text}: no such key")
    finished = tuple(replace(spec, config=_built(spec, data[spec.name], problems)) for spec in specs)
    if problems:
        raise ConfigError("configuration has problems:\n" + "\n".join(f"  {line}" for line in problems))
    return finished


def _built(spec: ProcessSpec, data: dict[str, object], problems: list[str]) -> ServiceConfig:
    """The configuration from plain data; appends to ``problems`` and keeps the old one when it is bad."""

    def complain(key: str, text: str) -> None:
        problems.append(f"{spec.name}: {key}: {text}")

    return build(type(spec.config), data, complain) or spec.config


def _is_addressed(spec: ProcessSpec, who: str) -> bool:
    return who in {spec.name, spec.kind} or (who == "workers" and spec.kind != "router")


def _put(data: dict[str, object], keys: Sequence[str], value: str) -> bool:
    """Set an existing nested key; False when there is no such key."""
    *sections, last = keys
    for section in sections:
        below = data.get(section)
        if not isinstance(below, dict):
            return False
        data = below
    if last not in data or isinstance(data[last], dict):
        return False
    data[last] = value
    return True
