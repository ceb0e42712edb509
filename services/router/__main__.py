"""The router's process: configuration in; HTTP gateway, gRPC server and dispatcher out.

Order up: metrics, gRPC (workers announce themselves), HTTP. Order down: refuse new requests, let the
running ones end, then HTTP, gRPC, the workers' streams.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress

import uvicorn
import uvloop

from services.router.control import RouterControl
from services.router.dispatch import Dispatcher
from services.router.gateway.app import create_app
from services.router.gateway.limits import GatewayLimits
from services.router.gateway.protocol import GatewayProtocol
from services.router.model import image_limits, load_model
from shared.clock import Clock, MonotonicClock, SystemEntropy
from shared.config.load import config_from_args
from shared.config.services import HttpConfig, RegistryConfig, RouterConfig, ServerConfig
from shared.errors import ConfigError
from shared.registry.base import Registry
from shared.registry.memory import MemoryRegistry
from shared.rpc.control import ControlServicer
from shared.rpc.inference import InferenceServicer
from shared.rpc.server import RpcServer
from shared.rpc.worker_client import WorkerClient
from shared.telemetry.http import MetricsServer
from shared.telemetry.logs import configure, get_logger
from shared.telemetry.tracing import Tracer, build_tracer

log = get_logger("services.router")

#: How long connections get to close once nothing runs any more.
GRACE_S = 2


class GatewayServer(uvicorn.Server):
    """uvicorn without its own signal handling: the process has one way down."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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
        control = RouterControl(dispatcher.workers, local, remote, config.registry.heartbeat_s)
        rpc, grpc_port = await _rpc_server(config.server, dispatcher, control)
        stack.push_async_callback(rpc.stop, GRACE_S)
        gateway = _gateway(config, dispatcher)
        listener = _listen(config.http)
        serving = asyncio.create_task(gateway.serve([listener]))
        stack.push_async_callback(_stop_gateway, gateway, serving)
        ticking = asyncio.create_task(dispatcher.run())
        polling = asyncio.create_task(_poll(dispatcher, remote, config.registry.heartbeat_s))
        stack.callback(ticking.cancel)
        stack.callback(polling.cancel)
        log.info(
            "listening",
            http_port=listener.getsockname()[1],
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
    # Of this process alone: a router that starts again is fenced by nothing that it did before.
    stream_id = f"{config.router_id}-{entropy.hex_id()}"
    return Dispatcher(
        [load_model(config.model, config.limits, int(time.time()))],
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
    config: ServerConfig, dispatcher: Dispatcher, control: RouterControl
) -> tuple[RpcServer, int]:
    rpc = RpcServer(config.host, config.port, max_message_bytes=config.max_message_bytes)
    InferenceServicer(dispatcher).add_to(rpc.server)
    ControlServicer(control).add_to(rpc.server)
    port = await rpc.start()
    await rpc.set_serving(True)
    return rpc, port


def _gateway(config: RouterConfig, dispatcher: Dispatcher) -> GatewayServer:
    limits = GatewayLimits(max_body=config.http.max_body_bytes, images=image_limits(config.limits))
    return GatewayServer(
        uvicorn.Config(
            create_app(dispatcher, limits),
            loop="none",
            http=GatewayProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=GRACE_S,
        )
    )


def _listen(config: HttpConfig) -> socket.socket:
    """The gateway's socket. Raises ConfigError when the port is taken."""
    listener = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen for HTTP on port {config.port}: {error.strerror}") from None
    return listener


async def _stop_gateway(gateway: GatewayServer, serving: asyncio.Task[None]) -> None:
    gateway.should_exit = True
    await serving


async def _poll(dispatcher: Dispatcher, registry: Registry, every_s: float) -> None:
    """Find workers that announced themselves elsewhere."""
    while True:
        await dispatcher.workers.poll(registry)
        await asyncio.sleep(every_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
