"""The process around an engine: gRPC server, announcements, metrics, signals, and the way down.

Order up: engine thread, gRPC server, announcer. Order down: drain, withdraw, stop the engine, then
the puller and the arenas. A fatal engine error ends the process with status 1, so that
its requests go on elsewhere.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import uvloop

from shared.clock import MonotonicClock, SystemEntropy
from shared.config.services import TelemetryConfig, WorkerConfig
from shared.engine.backend import Backend, load_backend
from shared.engine.build import Environment, build_token_engine, max_model_len
from shared.engine.build_encoder import build_encoder_engine
from shared.engine.port import Core, EnginePort
from shared.engine.store_calls import RemoteEmbeddingCalls, RemoteStoreCalls
from shared.engine.thread import STATUS_INTERVAL_S
from shared.failpoints import Failpoints
from shared.rpc.control import Announcer, ControlClient
from shared.rpc.server import RpcServer
from shared.rpc.worker_stream import WorkerServicer
from shared.telemetry.http import MetricsServer
from shared.telemetry.logs import configure, get_logger
from shared.telemetry.tracing import Tracer, build_tracer
from shared.tiering.embedding_pool import EmbeddingPool
from shared.tiering.membership import Membership, Nodes
from shared.tiering.pool import StorePool
from shared.tiering.remote import EmbeddingClient, KvStoreClient
from shared.transfer.agent import TransferAgent
from shared.transfer.arena import Arena
from shared.transfer.factory import make_backends
from shared.transfer.puller import Puller
from shared.types.transfer import AgentInfo
from shared.types.worker import WorkerInfo

log = get_logger(__name__)


class Loop(Protocol):
    """An engine's thread."""

    def start(self) -> None: ...
    def stop(self) -> None: ...


@dataclass
class Host:
    """One running worker process. ``exit_code`` is set by whoever ends it."""

    config: WorkerConfig
    backend: Backend
    environment: Environment
    stopping: asyncio.Event
    event_loop: asyncio.AbstractEventLoop
    address: str = ""
    exit_code: int = 0
    num_recalled: int = 0
    agent: TransferAgent | None = None

    def agent_info(self) -> AgentInfo:
        """The agent's metadata with the epoch of now."""
        if self.agent is None:
            raise RuntimeError("the transfer agent is not up yet")
        return self.agent.info(self.backend.layout(self.config.kv.block_size))

    def info(self) -> WorkerInfo:
        """What the worker announces."""
        config = self.config
        return WorkerInfo(
            worker_id=config.worker_id,
            incarnation=self.environment.incarnation,
            kind=config.kind,
            address=self.address,
            model=self.backend.identity.model,
            identity=self.backend.identity,
            agent=self.agent_info(),
            block_size=config.kv.block_size,
            max_model_len=max_model_len(config, self.backend),
            pid=os.getpid(),
            recalled=self.num_recalled > 0,
        )

    def make_agent(self, arenas: Mapping[str, Arena]) -> TransferAgent:
        """Register the arenas with every configured backend."""
        config, incarnation = self.config, self.environment.incarnation
        backends = make_backends(config.transfer, f"{config.worker_id}-{incarnation}")
        self.agent = TransferAgent(config.worker_id, incarnation, backends, arenas, config.transfer.order)
        return self.agent

    def fatal(self, error: BaseException) -> None:
        """The engine cannot go on (any thread)."""
        self.exit_code = 1
        self.event_loop.call_soon_threadsafe(self.stopping.set)


def run_worker(config: WorkerConfig) -> int:
    """Run one worker until SIGTERM or SIGINT; returns the exit status."""
    configure(f"{config.kind}:{config.worker_id}", config.telemetry.log_level)
    return uvloop.run(_serve(config))


async def _serve(config: WorkerConfig) -> int:
    event_loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        event_loop.add_signal_handler(signum, stopping.set)
    incarnation = SystemEntropy().hex_id()
    environment = Environment(
        clock=MonotonicClock(),
        entropy=SystemEntropy(),
        failpoints=Failpoints.parse(config.runtime.failpoints),
        tracer=_tracer(config.kind, config.worker_id, config.telemetry),
        incarnation=incarnation,
    )
    backend = load_backend(config.model, config.runtime)
    host = Host(config, backend, environment, stopping, event_loop)
    build = _encoder if config.kind == "encoder" else _token_worker
    core, loop, port, close = build(host)
    try:
        await _run(host, core, loop, port)
    finally:
        await asyncio.to_thread(loop.stop)
        await close()
        environment.tracer.close()
    return host.exit_code


Built = tuple[Core, Loop, EnginePort, Callable[[], Awaitable[None]]]


def _token_worker(host: Host) -> Built:
    config, environment = host.config, host.environment
    calls = _store_calls(host)
    engine = build_token_engine(config, host.backend, environment, calls, host.fatal)
    host.num_recalled = engine.num_recalled
    agent = host.make_agent(engine.arenas)
    puller = Puller(
        agent,
        deliver=engine.desk.deliver,
        notified=engine.desk.notified,
        settled=engine.desk.settle,
        clock=environment.clock,
        deadline_s=config.transfer.deadline_s,
        failpoints=environment.failpoints,
        verify=config.kv.verify,
    )
    puller.expect(config.kind == "prefill")
    engine.desk.bind(puller)

    async def close() -> None:
        if calls is not None:
            await calls.close()
        puller.close()
        agent.close()
        engine.memory.close()

    return engine.core, engine.loop, EnginePort(engine.core, host.info), close


def _store_calls(host: Host) -> RemoteStoreCalls | None:
    config = host.config
    if not _may_have_stores(config):
        return None
    identity, layout = host.backend.identity, host.backend.layout(config.kv.block_size)
    pool = StorePool(
        lambda address: KvStoreClient(address, identity, layout),
        config.kv_stores,
        config.store_replicas,
    )
    return RemoteStoreCalls(pool, _membership(host, pool), host.agent_info, host.event_loop)


def _embedding_calls(host: Host) -> RemoteEmbeddingCalls | None:
    config, identity = host.config, host.backend.identity
    if not _may_have_stores(config):
        return None
    pool = EmbeddingPool(
        lambda address: EmbeddingClient(address, identity), config.kv_stores, config.store_replicas
    )
    return RemoteEmbeddingCalls(pool, _membership(host, pool), host.event_loop)


def _may_have_stores(config: WorkerConfig) -> bool:
    return bool(config.kv_stores or config.routers)


def _membership(host: Host, pool: Nodes) -> Membership:
    config = host.config
    routers = [ControlClient(address) for address in config.routers]
    membership = Membership(pool, config.kv_stores, routers, host.backend.identity.model)
    membership.start()
    return membership


def _encoder(host: Host) -> Built:
    config, environment = host.config, host.environment
    calls = _embedding_calls(host)
    engine = build_encoder_engine(
        config, host.backend, environment, host.event_loop, host.agent_info, host.fatal, calls
    )
    agent = host.make_agent(engine.arenas)
    puller = Puller(
        agent,
        deliver=engine.desk.deliver,
        notified=engine.desk.notified,
        settled=engine.desk.settle,
        clock=environment.clock,
        deadline_s=config.transfer.deadline_s,
        failpoints=environment.failpoints,
        verify=config.kv.verify,
    )
    puller.expect(True)
    engine.desk.bind(puller)

    async def close() -> None:
        await engine.preparer.close()
        if calls is not None:
            await calls.close()
        puller.close()
        agent.close()
        engine.arenas["ec"].close()

    return engine.core, engine.loop, EnginePort(engine.core, host.info, engine.core.put_media), close


async def _run(host: Host, core: Core, loop: Loop, port: EnginePort) -> None:
    config = host.config
    server = RpcServer(
        config.server.host, config.server.port, max_message_bytes=config.server.max_message_bytes
    )
    WorkerServicer(
        port, max_media_bytes=config.encoder.max_media_bytes, heartbeat_s=STATUS_INTERVAL_S
    ).add_to(server.server)
    metrics = MetricsServer(config.server.metrics_host, config.server.metrics_port)
    metrics_port = metrics.start()
    loop.start()
    bound = await server.start()
    host.address = f"{config.server.host}:{bound}"
    await server.set_serving(True)
    announcer = Announcer(config.routers, host.info, _epoch_setter(host))
    announcer.start()
    log.info("ready", address=host.address, metrics_port=metrics_port, model=host.backend.identity.model)
    await host.stopping.wait()
    if not host.exit_code:
        await _drain(host, core)
    await announcer.close()
    await server.stop(0.5)
    metrics.close()


async def _drain(host: Host, core: Core) -> None:
    """Take nothing new and wait until nothing runs, at most ``drain_s``. Routers hear of it by status;
    they would give up what still runs if the worker withdrew first."""
    core.drain()
    with suppress(TimeoutError):
        async with asyncio.timeout(host.config.runtime.drain_s):
            while _busy(core) and not host.exit_code:
                await asyncio.sleep(0.05)


def _busy(core: Core) -> bool:
    status = core.status()
    return bool(status.num_running or status.num_waiting or status.num_leases)


def _epoch_setter(host: Host) -> Callable[[int], None]:
    def set_epoch(epoch: int) -> None:
        if host.agent is not None:
            host.agent.set_epoch(epoch)

    return set_epoch


def _tracer(kind: str, worker_id: str, config: TelemetryConfig) -> Tracer:
    return build_tracer(kind, config.otlp_endpoint, pid=os.getpid(), attributes={"worker.id": worker_id})
