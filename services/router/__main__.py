"""The router's process: configuration in; HTTP gateway, gRPC server and dispatcher out.

Order up: metrics, gRPC (workers announce themselves), HTTP. Order down: refuse new requests, let the
running ones end, then HTTP, gRPC, the workers' streams.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress

import uvloop

from services.router.control import RouterControl
from services.router.dispatch import Dispatcher
from services.router.gateway.limits import GatewayLimits
from services.router.gateway.server import GRACE_S, GatewayServer
from services.router.model import image_limits, load_model
from shared.clock import Clock, MonotonicClock, SystemEntropy
from shared.config.load import config_from_args
from shared.config.services import RegistryConfig, RouterConfig
from shared.errors import ConfigError
from shared.registry.base import Registry
from shared.registry.memory import MemoryRegistry
from shared.routing.stores import KnownStores
from shared.rpc.control import ControlServicer
from shared.rpc.inference import InferenceServicer
from shared.rpc.server import RpcServer
from shared.rpc.worker_client import WorkerClient
from shared.telemetry.http import MetricsServer
from shared.telemetry.logs import configure, get_logger
from shared.telemetry.tracing import Tracer, build_tracer

log = get_logger("services.router")


def main(argv: Sequence[str]) -> int:
    """Run the router until told to stop. Returns the exit status: 2 for a configuration that cannot
    work (what is wrong goes to stderr)."""
    try:
        config = config_from_args(RouterConfig, argv)
        configure("router", config.telemetry.log_level)
        uvloop.run(_serve(config))
    except ConfigError as error:
        print(f"triptych router: {error.message}", file=sys.stderr)
        return 2
    return 0


async def _serve(config: RouterConfig) -> None:
    stopping = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stopping.set)
    clock = MonotonicClock()
    async with AsyncExitStack() as stack:
        tracer = build_tracer("router", config.telemetry.otlp_endpoint, pid=os.getpid())
        stack.callback(tracer.close)
        dispatcher = _dispatcher(config, clock, tracer)
        stack.push_async_callback(dispatcher.workers.close)
        local = MemoryRegistry(clock, config.registry.ttl_s)
        remote = _shared_registry(config.registry, local)
        stack.push_async_callback(remote.close)
        metrics = MetricsServer(config.server.metrics_host, config.server.metrics_port)
        metrics_port = metrics.start()
        stack.callback(metrics.close)
        stores = KnownStores(clock, config.registry.ttl_s)
        control = RouterControl(dispatcher.workers, stores, local, remote, config.registry.heartbeat_s)
        rpc, grpc_port = await _rpc_server(config, dispatcher, control)
        stack.push_async_callback(rpc.stop, GRACE_S)
        gateway = _gateway(config, dispatcher)
        http_port = gateway.start(config.http.host, config.http.port)
        stack.push_async_callback(gateway.stop)
        ticking = asyncio.create_task(dispatcher.run())
        polling = asyncio.create_task(_poll(control, config.registry.heartbeat_s))
        stack.callback(ticking.cancel)
        stack.callback(polling.cancel)
        log.info(
            "listening",
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
        )
        await stopping.wait()
        await rpc.set_serving(False)
        with suppress(TimeoutError):  # a client that does not read must not hold the process up
            async with asyncio.timeout(config.runtime.drain_s + GRACE_S):
                await dispatcher.drain(config.runtime.drain_s)


def _dispatcher(config: RouterConfig, clock: Clock, tracer: Tracer) -> Dispatcher:
    entropy = SystemEntropy()
    expects_encoder = "encoder" in config.routing.phases
    # Of this process alone: a router that starts again is fenced by nothing that it did before.
    stream_id = f"{config.router_id}-{entropy.hex_id()}"
    return Dispatcher(
        [load_model(config.model, config.limits, int(time.time()), expects_encoder=expects_encoder)],
        lambda info, number: WorkerClient(info.address, stream_id, number),
        clock=clock,
        entropy=entropy,
        tracer=tracer,
        wall_clock=lambda: int(time.time()),
        routing=config.routing,
        limits=config.limits,
        lease_s=config.transfer.lease_s,
    )


def _shared_registry(config: RegistryConfig, local: Registry) -> Registry:
    """The registry that routers share; ``local`` when there is none."""
    if config.kind == "memory":
        return local
    from shared.registry.redis import RedisRegistry

    return RedisRegistry(config.redis_url, config.ttl_s, prefix=config.prefix)


async def _rpc_server(
    config: RouterConfig, dispatcher: Dispatcher, control: RouterControl
) -> tuple[RpcServer, int]:
    # A request may be as large here as over HTTP.
    max_bytes = max(config.server.max_message_bytes, config.http.max_body_bytes)
    rpc = RpcServer(config.server.host, config.server.port, max_message_bytes=max_bytes)
    InferenceServicer(dispatcher).add_to(rpc.server)
    ControlServicer(control).add_to(rpc.server)
    port = await rpc.start()
    await rpc.set_serving(True)
    return rpc, port


def _gateway(config: RouterConfig, dispatcher: Dispatcher) -> GatewayServer:
    http = config.http
    limits = GatewayLimits(
        max_body=http.max_body_bytes,
        max_connections=http.max_connections,
        header_timeout_s=http.header_timeout_s,
        images=image_limits(config.limits),
    )
    return GatewayServer(dispatcher, limits)


async def _poll(control: RouterControl, every_s: float) -> None:
    """Find workers and stores that announced themselves elsewhere."""
    while True:
        await control.poll()
        await asyncio.sleep(every_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
