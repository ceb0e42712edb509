"""A running deployment: processes started, watched and known to be ready, and everything ended at exit.

Owns the order of a start (lock, leftovers, ports, plan, processes, readiness) and of an end.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import httpx

from services.cli import preflight, procfs
from services.cli.leftovers import end_leftovers, stop_lost_launchers
from services.cli.metrics_view import Samples, scrape
from services.cli.ports import HOST
from services.cli.signals import Interrupted
from services.cli.state import Deployed, StateDir
from services.cli.supervisor import StopTimes, Supervisor
from services.cli.topology import LaunchOptions, ProcessSpec, Topology, plan
from shared.clock import Clock, MonotonicClock, SystemEntropy
from shared.config.services import RouterConfig
from shared.errors import InternalError
from shared.transfer.keeper import Keeper

POLL_S = 0.1
Progress = Callable[[str], None]


class NotReady(InternalError):
    """The processes run but did not become ready in time."""

    code = "not_ready"


@dataclass(frozen=True)
class Deployment:
    """What a caller needs of it: addresses, specifications, the supervisor, and what a user should know."""

    http_url: str
    grpc_address: str
    model: str
    specs: tuple[ProcessSpec, ...]
    supervisor: Supervisor
    notes: tuple[str, ...] = ()

    def pids(self) -> dict[str, int]:
        """Process ids by name, of those that run now."""
        return {row.name: row.pid for row in self.supervisor.rows() if row.pid}


@contextlib.contextmanager
def deployed(
    state: StateDir,
    topology: Topology,
    options: LaunchOptions,
    *,
    restart: bool = True,
    ready_timeout_s: float = 120.0,
    stop_times: StopTimes | None = None,
    progress: Progress = lambda text: None,
    warn: Progress = lambda text: None,
    stopping: threading.Event | None = None,
) -> Iterator[Deployment]:
    """Start everything, yield when every process is ready, stop everything at exit.

    ``warn`` is told what will run otherwise than it was asked for. Raises AlreadyUp, ConfigError (nothing was
    started), StartFailed, NotReady, Interrupted when ``stopping`` is set meanwhile, and StateLost when the
    state directory is removed or replaced: that sets ``stopping`` too.
    """
    stopping = stopping or threading.Event()
    with state.locked(), contextlib.closing(Keeper()) as keeper:
        for pid in stop_lost_launchers(state):
            progress(f"stopped the launcher of an earlier directory of this name (pid {pid})")
        if left := end_leftovers(state):
            progress(f"ended what an earlier launcher left behind: {', '.join(left)}")
        specs, notes = checked_plan(topology, replace(options, keeper=keeper.address))
        preflight.refuse_taken_ports(specs)
        for note in notes:
            warn(f"warning: {note}")
        supervisor = Supervisor(specs, state, restart=restart, lost=stopping.set)
        deployment = _describe(specs, supervisor, notes)
        try:
            _note(state, deployment, ready=False)
            supervisor.start()
            _wait_ready(deployment, topology, ready_timeout_s, progress, stopping)
            supervisor.guard()
            _note(state, deployment, ready=True)
            yield deployment
            if state.is_lost():
                raise state.lost()
        finally:
            supervisor.stop(stop_times, progress)


def checked_plan(
    topology: Topology, options: LaunchOptions
) -> tuple[tuple[ProcessSpec, ...], tuple[str, ...]]:
    """The processes to start, and what a user should know of them. Raises ConfigError: it cannot work."""
    public = {options.ports.http, options.ports.grpc, options.ports.metrics}
    internal = (port for port in procfs.internal_ports(HOST, SystemEntropy()) if port not in public)
    specs = plan(topology, options, internal)
    notes = preflight.check(specs, os.environ)
    preflight.check_weights(specs)
    return specs, notes


def _describe(specs: tuple[ProcessSpec, ...], supervisor: Supervisor, notes: tuple[str, ...]) -> Deployment:
    router = specs[0].config
    if not isinstance(router, RouterConfig):
        raise TypeError("the router comes first in a plan")
    model = router.model.name or os.path.basename(router.model.path.rstrip("/"))
    url = f"http://{HOST}:{router.http.port}"
    return Deployment(url, specs[0].grpc_address, model, specs, supervisor, notes)


def _note(state: StateDir, deployment: Deployment, ready: bool) -> None:
    """Describe the deployment for other commands. Raises ConfigError when there is no room for it, StateLost
    when the directory is not ours any more."""
    if state.is_lost():
        raise state.lost()
    record = Deployed(
        launcher_pid=os.getpid(),
        model=deployment.model,
        http=deployment.http_url,
        grpc=deployment.grpc_address,
        metrics={spec.name: spec.metrics_address for spec in deployment.specs},
        ready=ready,
        notes=deployment.notes,
    )
    try:
        state.write_deployed(record)
    except OSError as error:
        raise state.unusable(error) from None


def _wait_ready(
    deployment: Deployment,
    topology: Topology,
    timeout_s: float,
    progress: Progress,
    stopping: threading.Event,
    clock: Clock | None = None,
) -> None:
    """Until the gateway says 200 and the router counts every worker."""
    clock = clock or MonotonicClock()
    started = clock.now()
    said = ""
    with httpx.Client(timeout=2.0, trust_env=False) as client:
        while True:
            if deployment.supervisor.failure is not None:
                raise deployment.supervisor.failure
            waiting = _missing(client, deployment, topology)
            if not waiting:
                return
            elapsed = clock.now() - started
            if elapsed > timeout_s:
                raise NotReady(
                    f"not ready after {timeout_s:.0f} s; waiting for {', '.join(waiting)} (triptych logs)"
                )
            said = _say(progress, f"waiting for {', '.join(waiting)}", said)
            if stopping.wait(POLL_S) and deployment.supervisor.failure is None:
                raise Interrupted("stopped while starting")


def _say(progress: Progress, text: str, before: str) -> str:
    if text != before:
        progress(text)
    return text


def _missing(client: httpx.Client, deployment: Deployment, topology: Topology) -> list[str]:
    """What is not ready yet, in words; empty when everything is."""
    samples = scrape(client, deployment.specs[0].metrics_address)
    if samples is None:
        return ["router"]
    missing = _unannounced(samples, topology)
    stores = [spec for spec in deployment.specs if spec.kind == "kv_store"]
    missing += [
        spec.name for spec in stores if not _answers(client, f"http://{spec.metrics_address}/healthz")
    ]
    if not missing and not _answers(client, f"{deployment.http_url}/health"):
        missing.append("gateway")
    return missing


def _unannounced(samples: Samples, topology: Topology) -> list[str]:
    """Kinds to which the router has fewer streams than workers were started."""
    counts = {kind: int(samples.value("triptych_workers", kind=kind)) for kind in topology.phases}
    return [
        f"{kind} ({counts[kind]}/{number})"
        for kind, number in topology.phases.items()
        if counts[kind] < number
    ]


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
