"""A deployment of real processes for chaos: started by the launcher's own plan and supervisor, asked over
its own RPCs. Owns no judgement and strikes nobody (``faults`` does).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.cli import procfs
from services.cli.leftovers import end_leftovers
from services.cli.metrics_view import Samples
from services.cli.state import StateDir
from services.cli.supervisor import Backoff, StopTimes, Supervisor, _Child
from services.cli.topology import HOST, LaunchOptions, ProcessSpec, PublicPorts, Topology, plan
from shared.clock import SystemEntropy
from shared.config.services import ModelConfig, RouterConfig
from shared.errors import TriptychError
from shared.rpc.control import ControlClient
from shared.rpc.kv_store import KvStoreStub
from shared.rpc.worker_client import WorkerClient
from shared.transfer.keeper import Keeper
from shared.types.worker import WorkerInfo, WorkerStatus
from tests.chaos.http_client import ResponseBroken, begin_call, request_bytes
from tests.chaos.records import Rest

WITNESS = Path(__file__).parents[2] / "models" / "witness"
KINDS = ("encoder", "prefill", "decode", "kv_store")
POLL_S = 0.05

#: Small pools, so that eviction and preemption happen, short leases, and a crash is never held against a
#: request: here the requests are innocent.
SETTINGS = (
    "transfer.lease_s=1.0",
    "scheduler.max_model_len=1024",
    "prefill:kv.num_blocks=768",
    "decode:kv.num_blocks=320",
    "kv_store:kv.num_blocks=512",
    "encoder:encoder.memory_mb=1",
    "prefill:encoder.memory_mb=1",
    "decode:encoder.memory_mb=1",
    "router:routing.crash_limit=1000",
    "router:routing.placement=apart",
    "telemetry.log_level=info",
)


@dataclass(frozen=True)
class Node:
    """A worker as the router lists it."""

    info: WorkerInfo
    status: WorkerStatus | None


@dataclass(frozen=True)
class Death:
    """The end of a process as the supervisor saw it; ``at`` in seconds of the monotonic clock."""

    name: str
    code: int
    at: float


class _Undertaker(Supervisor):
    """A supervisor that remembers who died, and how."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.deaths: list[Death] = []

    def _buried(self, child: _Child, code: int, now: float) -> None:
        super()._buried(child, code, now)
        self.deaths.append(Death(child.spec.name, code, now))

    def respecify(self, spec: ProcessSpec) -> None:
        """What the next life of the process of this name is started from."""
        with self._lock:
            child = next(child for child in self._children if child.spec.name == spec.name)
            child.spec = spec


class Cluster:
    """A running deployment. ``specs`` in the order of the plan, router first."""

    def __init__(self, specs: tuple[ProcessSpec, ...], supervisor: _Undertaker, state: StateDir) -> None:
        self.specs = specs
        self._state = state
        self.supervisor = supervisor
        router = specs[0].config
        assert isinstance(router, RouterConfig)
        self.http = (HOST, router.http.port)
        self._control = ControlClient(specs[0].grpc_address)

    def of_kind(self, kind: str) -> list[ProcessSpec]:
        return [spec for spec in self.specs if spec.kind == kind]

    def pid(self, name: str) -> int:
        """The process id that the supervisor knows now; 0 while there is none."""
        return next(row.pid for row in self.supervisor.rows() if row.name == name)

    @property
    def deaths(self) -> list[Death]:
        """All so far, in order."""
        return list(self.supervisor.deaths)

    def arm_next_life(self, spec: ProcessSpec, failpoints: str) -> None:
        """Arm these, and no others, in the process that takes the place of the present one. That must have
        read its own configuration."""
        runtime = replace(spec.config.runtime, failpoints=failpoints)
        self.supervisor.respecify(replace(spec, config=replace(spec.config, runtime=runtime)))

    async def nodes(self) -> dict[str, Node]:
        """The workers that the router is connected to, by worker id; empty when it does not answer."""
        try:
            listed = await self._control.workers()
        except TriptychError:
            return {}
        return {info.worker_id: Node(info, status) for info, status in listed}

    async def until_kind_whole(self, kind: str, timeout_s: float = 60.0) -> None:
        """Every worker of this kind is there. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not await self._is_there(self.of_kind(kind)):
                await asyncio.sleep(POLL_S)

    async def until_whole(self, timeout_s: float = 60.0) -> None:
        """Raises TimeoutError, or what ended a process while it started."""
        async with asyncio.timeout(timeout_s):
            while not await self._is_there(self.specs[1:]):
                if self.supervisor.failure is not None:
                    raise self.supervisor.failure
                await asyncio.sleep(POLL_S)

    async def status(self, spec: ProcessSpec) -> WorkerStatus | None:
        """Ask a worker itself; None when it does not answer."""
        client = (
            KvStoreStub(spec.grpc_address)
            if spec.kind == "kv_store"
            else WorkerClient(spec.grpc_address, "chaos", 0)
        )
        try:
            return (await client.status())[1]
        except TriptychError:
            return None
        finally:
            await client.close()

    async def metrics(self, spec: ProcessSpec) -> Samples:
        """A process's metrics; none when it does not answer."""
        host, _, port = spec.metrics_address.rpartition(":")
        body = bytearray()
        try:
            call = await begin_call((host, int(port)), request_bytes("GET", "/metrics"), body.extend)
            async with asyncio.timeout(2.0):
                await call.finished
        except (OSError, ResponseBroken, TimeoutError):
            return Samples("")
        return Samples(body.decode())

    async def at_rest(self, patience_s: float, *, without: Collection[str] = ()) -> list[Rest]:
        """What every process still holds, as soon as that is nothing, or after ``patience_s``. ``without``:
        the names of those that are dead on purpose."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + patience_s
        while True:
            rests = [await self._rest(spec) for spec in self.specs if spec.name not in without]
            if loop.time() > give_up_at or not any(count for rest in rests for count in rest.counts.values()):
                return rests
            await asyncio.sleep(POLL_S)

    def restarts(self) -> dict[str, int]:
        """How often each process was started again, by name."""
        return {row.name: row.restarts for row in self.supervisor.rows()}

    def logged_errors(self) -> list[tuple[str, str]]:
        """What processes logged as errors, and traces outside of their logs, with the process's name.
        What native libraries say there is not ours."""
        found = []
        for spec in self.specs:
            for line in self._state.log_file(spec.name).read_text(encoding="utf-8").splitlines():
                try:
                    entry = json.loads(line)
                except ValueError:
                    if line.startswith(("Traceback", "Fatal")):
                        found.append((spec.name, line))
                    continue
                if entry["level"] in ("error", "critical"):
                    found.append((spec.name, f"{entry['message']} {entry.get('error', '')}"))
        return found

    async def _is_there(self, specs: Sequence[ProcessSpec]) -> bool:
        """Whether the router is connected to each of these, in its present process."""
        nodes = await self.nodes()
        return all(spec.name in nodes and nodes[spec.name].info.pid == self.pid(spec.name) for spec in specs)

    async def _rest(self, spec: ProcessSpec) -> Rest:
        if spec.kind == "router":
            samples = await self.metrics(spec)
            names = ("triptych_requests_running", "triptych_requests_queued")
            return Rest(spec.name, {name: int(samples.value(name)) for name in names})
        status = await self.status(spec)
        if status is None:
            return Rest(spec.name, {"silent": 1})
        counts = {
            "running": status.num_running,
            "waiting": status.num_waiting,
            "held": status.num_blocks_held,
            "quarantined": status.num_blocks_quarantined,
            "leases": status.num_leases,
            "missing": status.num_blocks - status.num_blocks_free,
        }
        if spec.kind == "encoder":
            del counts["missing"]  # embeddings stay cached: their blocks are found by hash, not free
        return Rest(spec.name, counts)

    async def close(self) -> None:
        await self._control.close()


@asynccontextmanager
async def running(
    root: Path,
    topology: Topology,
    overrides: Sequence[str] = (),
    *,
    restart: bool = True,
    as_spec: Callable[[ProcessSpec], ProcessSpec] = lambda spec: spec,
) -> AsyncIterator[Cluster]:
    """Start everything on free ports, yield when the router sees every worker, stop everything. Logs are
    left under ``root``. ``as_spec`` may have a process started in another way."""
    state = StateDir(root)
    with state.locked(), contextlib.closing(Keeper()) as keeper:
        end_leftovers(state)
        ports = procfs.internal_ports(HOST, SystemEntropy())
        options = LaunchOptions(
            model=ModelConfig(str(WITNESS)),
            ports=PublicPorts(next(ports), next(ports), next(ports)),
            overrides=(*_fitting(topology), *overrides),
            keeper=keeper.address,
        )
        specs = tuple(map(as_spec, plan(topology, options, ports)))
        supervisor = _Undertaker(specs, state, restart=restart, backoff=Backoff(0.05, 1.0, 0.05))
        cluster = Cluster(specs, supervisor, state)
        try:
            supervisor.start()
            await cluster.until_whole()
            supervisor.guard()
            yield cluster
        finally:
            await cluster.close()
            await asyncio.to_thread(supervisor.stop, StopTimes(drain_s=3.0, exit_s=3.0))


def _fitting(topology: Topology) -> list[str]:
    """The settings that address somebody."""
    counts = {
        "encoder": topology.encoders,
        "prefill": topology.prefills,
        "decode": topology.decodes,
        "kv_store": topology.kv_stores,
    }
    return [text for text in SETTINGS if counts.get(text.partition(":")[0], 1)]
