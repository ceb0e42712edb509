"""The KV store's process: configuration in, memory, tiers, gRPC and announcements out."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvloop

from services.kv_store.memory import StoreMemory
from services.kv_store.servicer import StoreService
from shared.clock import Clock, MonotonicClock, SystemEntropy
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
from shared.tiering.build import open_lower_tiers
from shared.tiering.embeddings import REGION, EmbeddingStore, RowFormat
from shared.tiering.kv_store import KvStore, Limits
from shared.tiering.lower import LowerTiers
from shared.tiering.reactor import LoopReactor
from shared.types.identity import IdentityKey, LayoutSpec
from shared.types.transfer import AgentInfo
from shared.types.worker import WorkerInfo

_log = get_logger(__name__)


class Memories:
    """Both stores' memory (an Opener); each is made when it is first wanted."""

    def __init__(
        self, config: StoreConfig, incarnation: str, lower: LowerTiers, clock: Clock, failpoints: Failpoints
    ) -> None:
        self._config = config
        self._incarnation = incarnation
        self._lower = lower
        self._clock = clock
        self._failpoints = failpoints
        self._epoch = 0
        self._made: dict[str, StoreMemory] = {}
        kv = config.kv
        self._limits = Limits(kv.policy, config.tenant_share, config.transfer.lease_s)

    def kv(self, identity: IdentityKey, layout: LayoutSpec) -> KvStore:
        config = self._config
        extents = tuple(group.extent_bytes(layout.block_size) for group in layout.groups)
        num_blocks = config.kv.num_blocks or (config.kv.memory_mb << 20) // sum(extents)
        made = self._make("kv", config.worker_id, num_blocks, extents, lambda ids: store.release(ids), layout)
        store = KvStore(
            identity,
            layout,
            made.arena,
            made.info,
            made.pulls,
            self._lower,
            self._clock,
            SystemEntropy(),
            self._failpoints,
            self._limits,
        )
        return store

    def embeddings(self, identity: IdentityKey, rows: RowFormat) -> EmbeddingStore | None:
        """None when there is no room for a single block."""
        config = self._config
        num_blocks = (config.embeddings_mb << 20) // rows.extent_bytes
        if not num_blocks:
            return None
        agent_id = f"{config.worker_id}.{REGION}"
        made = self._make(REGION, agent_id, num_blocks, (rows.extent_bytes,), lambda ids: store.release(ids))
        store = EmbeddingStore(
            identity,
            rows,
            made.arena,
            made.info,
            made.pulls,
            self._lower,
            self._clock,
            SystemEntropy(),
            self._limits,
        )
        return store

    def _make(
        self,
        region: str,
        agent_id: str,
        num_blocks: int,
        extents: tuple[int, ...],
        release: Callable[[list[str]], None],
        layout: LayoutSpec | None = None,
    ) -> StoreMemory:
        memory = StoreMemory(
            self._config,
            agent_id,
            self._incarnation,
            region,
            num_blocks,
            extents,
            self._lower.reactor,
            self._failpoints,
            release,
            layout,
        )
        memory.set_epoch(self._epoch)
        self._made[region] = memory
        return memory

    def agent(self) -> AgentInfo:
        """Of the blocks' memory; before it is made one that says where nothing is."""
        if memory := self._made.get("kv"):
            return memory.info()
        return AgentInfo(self._config.worker_id, self._incarnation, self._epoch, (), ())

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        for memory in self._made.values():
            memory.set_epoch(epoch)

    def close(self) -> None:
        for memory in self._made.values():
            memory.close()


def _acceptance(config: StoreConfig, own: IdentityKey) -> Callable[[IdentityKey, LayoutSpec | None], bool]:
    """Same model, revision and tokenizer as configured, and the block size of what has blocks; how the KV is
    stored and computed is the workers' choice."""

    def accepts(identity: IdentityKey, layout: LayoutSpec | None) -> bool:
        kept = msgspec.structs.replace(own, kv_dtype=identity.kv_dtype, numerics=identity.numerics)
        fits = layout is None or (layout.block_size == config.kv.block_size and bool(layout.groups))
        return identity == kept and fits

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
    reactor = LoopReactor(asyncio.get_running_loop())
    clock, failpoints = MonotonicClock(), Failpoints.parse(config.runtime.failpoints)
    lower = open_lower_tiers(config, reactor, clock, failpoints)
    memories = Memories(config, incarnation, lower, clock, failpoints)
    service = StoreService(base, _acceptance(config, identity), memories, lower)
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
    # Nobody writes to memory that is given back: first what is on its way, then the memory.
    lower.chain.close()
    reactor.close()
    memories.close()
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
