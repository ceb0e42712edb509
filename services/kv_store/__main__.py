"""The KV store's process: configuration in, memory, transfer, gRPC and announcements out."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import uvloop

from services.kv_store.servicer import StoreService
from services.kv_store.store import KvStore
from shared.clock import MonotonicClock, SystemEntropy
from shared.config.load import config_from_args
from shared.config.services import StoreConfig
from shared.errors import ConfigError
from shared.failpoints import Failpoints
from shared.registry.identity import identity_of
from shared.rpc.control import Announcer
from shared.rpc.kv_store import KvStoreServicer
from shared.rpc.server import RpcServer
from shared.telemetry.http import MetricsServer
from shared.telemetry.logs import configure, get_logger
from shared.transfer.agent import TransferAgent
from shared.transfer.arena import Arena
from shared.transfer.factory import make_backends
from shared.transfer.puller import Puller
from shared.types.identity import IdentityKey, LayoutSpec
from shared.types.transfer import AgentInfo
from shared.types.worker import WorkerInfo

_log = get_logger(__name__)


class PulledStore:
    """A store with its arena, agent and puller, whose callbacks come back to the event loop."""

    def __init__(self, config: StoreConfig, incarnation: str, layout: LayoutSpec, epoch: int) -> None:
        clock, entropy = MonotonicClock(), SystemEntropy()
        failpoints = Failpoints.parse(config.runtime.failpoints)
        extents = tuple(group.extent_bytes(layout.block_size) for group in layout.groups)
        num_blocks = config.kv.num_blocks or (config.kv.memory_mb << 20) // sum(extents)
        self._arena = Arena.create("kv", (num_blocks,) * len(extents), extents, incarnation, epoch)
        backends = make_backends(config.transfer, f"{config.worker_id}-{incarnation}")
        self._agent = TransferAgent(
            config.worker_id, incarnation, backends, {"kv": self._arena}, config.transfer.order
        )
        self._layout = layout
        self.store = KvStore(
            layout, self._arena, self.info, clock, entropy, failpoints, lease_s=config.transfer.lease_s
        )
        post = asyncio.get_running_loop().call_soon_threadsafe
        self._puller = Puller(
            self._agent,
            deliver=lambda outcome: _quietly(post, self.store.on_outcome, outcome),
            settled=lambda pull_id: _quietly(post, self.store.on_settled, pull_id),
            # A reader may give its lease back by notification, too.
            notified=lambda payload: _quietly(post, self.store.release, [payload.decode(errors="replace")]),
            clock=clock,
            deadline_s=config.transfer.deadline_s,
            failpoints=failpoints,
            verify=config.kv.verify,
        )
        self._puller.expect(True)
        self.store.bind(self._puller)

    def info(self) -> AgentInfo:
        return self._agent.info(self._layout)

    def set_epoch(self, epoch: int) -> None:
        self._agent.set_epoch(epoch)

    def close(self) -> None:
        self._puller.close()
        self._agent.close()
        self._arena.close()


def _quietly(post: Callable[..., object], call: Callable[..., None], argument: object) -> None:
    try:
        post(call, argument)
    except RuntimeError:
        _log.debug("the event loop has closed")


def _acceptance(config: StoreConfig, own: IdentityKey) -> Callable[[IdentityKey, LayoutSpec], bool]:
    """Same model, revision and tokenizer as configured, and the block size; how the KV is stored and
    computed is the workers' choice."""

    def accepts(identity: IdentityKey, layout: LayoutSpec) -> bool:
        kept = msgspec.structs.replace(own, kv_dtype=identity.kv_dtype, numerics=identity.numerics)
        return identity == kept and layout.block_size == config.kv.block_size and bool(layout.groups)

    return accepts


async def _serve(config: StoreConfig) -> None:
    stopping = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stopping.set)
    path = Path(config.model.path)
    name = config.model.name or path.resolve().name
    identity = identity_of(path, name, config.model.dtype, config.model.dtype)
    incarnation = SystemEntropy().hex_id()
    base = WorkerInfo(
        worker_id=config.worker_id,
        incarnation=incarnation,
        kind="kv_store",
        address="",
        model=name,
        identity=identity,
        agent=AgentInfo(config.worker_id, incarnation, 0, (), ()),
        block_size=config.kv.block_size,
        pid=os.getpid(),
    )
    service = StoreService(base, _acceptance(config, identity), partial(PulledStore, config, incarnation))
    server = RpcServer(
        config.server.host, config.server.port, max_message_bytes=config.server.max_message_bytes
    )
    KvStoreServicer(service).add_to(server.server)
    metrics = MetricsServer(config.server.metrics_host, config.server.metrics_port)
    metrics_port = metrics.start()
    service.address = f"{config.server.host}:{await server.start()}"
    await server.set_serving(True)
    announcer = Announcer(config.routers, service.info, service.set_epoch)
    announcer.start()
    watch = asyncio.create_task(service.watch(min(config.transfer.lease_s / 4, 1.0)))
    _log.info("ready", address=service.address, metrics_port=metrics_port, model=name)
    await stopping.wait()
    watch.cancel()
    await announcer.close()
    await server.stop(0.5)
    service.close()
    metrics.close()


def main(argv: list[str]) -> int:
    """Run until SIGTERM or SIGINT; 2 for a configuration that cannot work."""
    try:
        config = config_from_args(StoreConfig, argv)
        configure(f"kv_store:{config.worker_id}", config.telemetry.log_level)
        uvloop.run(_serve(config))
    except ConfigError as error:
        print(f"triptych kv_store: {error.message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
