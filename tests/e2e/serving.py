"""A deployment of real processes for end-to-end tests: the launcher's own start, on free ports, with a span
collector; asked over HTTP, gRPC and metrics like anyone else. Owns no judgement.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from services.cli import procfs
from services.cli.collector import SpanCollector
from services.cli.deployment import Deployment, Progress, deployed
from services.cli.metrics_view import Samples, scrape
from services.cli.state import StateDir
from services.cli.supervisor import StopTimes
from services.cli.timeline import SpanRecord
from services.cli.topology import HOST, LaunchOptions, ProcessSpec, PublicPorts, Topology
from shared.clock import SystemEntropy
from shared.config.services import ModelConfig
from shared.errors import TriptychError
from shared.rpc.control import ControlClient
from shared.rpc.kv_store import KvStoreStub
from shared.rpc.worker_client import WorkerClient
from shared.types.worker import WorkerStatus

ROOT = Path(__file__).parents[2]
WITNESS = ROOT / "models" / "witness"
#: Prepared weights are kept between runs, like the models themselves.
CACHE = ROOT / ".triptych" / "cache"
POLL_S = 0.05
#: No test waits longer for anything; only a broken one waits at all.
PATIENCE_S = 60.0
#: Spans of what has ended arrive within this time.
SPANS_S = 10.0


class Serving:
    """A running deployment. Its coroutines may run in any event loop."""

    def __init__(self, deployment: Deployment, collector: SpanCollector) -> None:
        self.url = deployment.http_url
        self.model = deployment.model
        self.model_dir = deployment.specs[0].config.model.path
        self.specs = deployment.specs
        self._supervisor = deployment.supervisor
        self._collector = collector

    def client(self) -> httpx.AsyncClient:
        """A plain HTTP client of the gateway."""
        return httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_S * 5, trust_env=False)

    def spec(self, name: str) -> ProcessSpec:
        return next(spec for spec in self.specs if spec.name == name)

    def pid(self, name: str) -> int:
        """The process id that the supervisor knows now; 0 while there is none."""
        return next(row.pid for row in self._supervisor.rows() if row.name == name)

    def metrics(self, name: str) -> Samples:
        """The metrics of a process, now."""
        with httpx.Client(timeout=10.0, trust_env=False) as client:
            samples = scrape(client, self.spec(name).metrics_address)
        assert samples is not None, f"{name} gives no metrics"
        return samples

    def trace(self, trace_id: str) -> list[SpanRecord]:
        """The spans of one trace that have arrived so far, by start."""
        found = (span for span in self._collector.spans() if span.trace_id == trace_id)
        return sorted(found, key=lambda span: span.start_ns)

    def wait_for_spans(self, enough: Callable[[Sequence[SpanRecord]], bool]) -> list[SpanRecord]:
        """All spans, as soon as they are ``enough``, or once no more are to come."""
        self._collector.wait_for(enough, SPANS_S)
        return self._collector.spans()

    def kill(self, name: str) -> int:
        """SIGKILL; returns the pid that was killed."""
        pid = self.pid(name)
        os.kill(pid, signal.SIGKILL)
        return pid

    async def until_back(self, name: str, killed: int) -> None:
        """Until the router is connected to the successor of a killed worker. Raises TimeoutError."""
        control = ControlClient(self.specs[0].grpc_address)
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    pids = {info.worker_id: info.pid for info, _ in await control.workers()}
                    if pids.get(name) not in (None, killed) and pids[name] == self.pid(name):
                        return
                    await asyncio.sleep(POLL_S)
        finally:
            await control.close()

    async def status(self, name: str) -> WorkerStatus:
        """Ask a worker itself. Raises TriptychError."""
        spec = self.spec(name)
        client: KvStoreStub | WorkerClient
        if spec.kind == "kv_store":
            client = KvStoreStub(spec.grpc_address)
        else:
            client = WorkerClient(spec.grpc_address, "tests", 0)
        try:
            return (await client.status())[1]
        finally:
            await client.close()

    async def at_rest(self, patience_s: float = 15.0) -> dict[str, int]:
        """What is still held anywhere: empty as soon as that is nothing, else after ``patience_s``."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + patience_s
        while (held := await self._held()) and loop.time() < give_up_at:
            await asyncio.sleep(POLL_S)
        return held

    async def _held(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        router = self.metrics("router")
        for name in ("requests_running", "requests_queued"):
            counts[f"router {name}"] = int(router.value(f"triptych_{name}"))
        for spec in self.specs[1:]:
            try:
                status = await self.status(spec.name)
            except TriptychError:
                counts[f"{spec.name} silent"] = 1
                continue
            counts[f"{spec.name} running"] = status.num_running + status.num_waiting
            counts[f"{spec.name} leases"] = status.num_leases
            counts[f"{spec.name} quarantined"] = status.num_blocks_quarantined
            counts[f"{spec.name} held"] = status.num_blocks_held
            if spec.kind != "encoder":  # embeddings stay findable by hash, and so are not free
                counts[f"{spec.name} missing"] = status.num_blocks - status.num_blocks_free
        return {name: count for name, count in counts.items() if count}


@contextmanager
def serving(
    model: Path,
    state: Path,
    topology: str,
    overrides: Sequence[str] = (),
    progress: Progress = lambda text: None,
) -> Iterator[Serving]:
    """Start everything, yield when it is ready, stop everything. Logs are left under ``state``."""
    ports = procfs.internal_ports(HOST, SystemEntropy())
    with SpanCollector() as collector:
        options = LaunchOptions(
            model=ModelConfig(str(model), cache_dir=str(CACHE)),
            ports=PublicPorts(next(ports), next(ports), next(ports)),
            otlp_endpoint=collector.endpoint,
            # What is tested here are the phases apart; alone is asked for where it is meant.
            overrides=("router:routing.placement=apart", *overrides),
            num_cores=len(os.sched_getaffinity(0)),
        )
        with deployed(
            StateDir(state),
            Topology.parse(topology),
            options,
            stop_times=StopTimes(drain_s=5.0, exit_s=5.0),
            progress=progress,
        ) as deployment:
            yield Serving(deployment, collector)
