"""Builds the engine of a prefill or decode worker from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shared.clock import Clock, Entropy
from shared.config import capacity
from shared.config.services import TransferConfig, WorkerConfig
from shared.engine.backend import Backend
from shared.engine.core import EngineCore, EngineParts
from shared.engine.desk import PullDesk
from shared.engine.embeddings import Embeddings
from shared.engine.inbox import Inbox, Outbox
from shared.engine.intake import Intake
from shared.engine.loop import EngineLoop
from shared.engine.memory import WorkerMemory, make_memory
from shared.engine.outflow import Outflow
from shared.engine.owners import Owners
from shared.engine.spans import RequestSpans
from shared.engine.store_link import RemoteStoreLink, StoreCalls, StoreLink
from shared.engine.tier_costs import TierCosts
from shared.failpoints import Failpoints
from shared.kv_cache.block_hash import BlockHasher
from shared.kv_cache.block_pool import BlockPool
from shared.kv_cache.encoder_cache import EncoderCache
from shared.kv_cache.leases import LeaseTable
from shared.kv_cache.manager import KVCacheManager
from shared.scheduler.scheduler import Scheduler, SchedulerLimits
from shared.telemetry.logs import get_logger
from shared.telemetry.tracing import Tracer
from shared.transfer.arena import Arena
from shared.transfer.shards import ranks_of

log = get_logger(__name__)

#: Blocks that may be on offer to the store at a time: they are pinned meanwhile.
MAX_OFFERED_BLOCKS = 256


@dataclass(frozen=True)
class Environment:
    """What a process gives to everything in it."""

    clock: Clock
    entropy: Entropy
    failpoints: Failpoints
    tracer: Tracer
    incarnation: str


@dataclass(frozen=True)
class TokenEngine:
    """A built engine; ``desk`` still wants its puller, ``store_calls`` may still be unreachable.
    ``num_recalled``: blocks of an earlier life that are found again."""

    core: EngineCore
    loop: EngineLoop
    desk: PullDesk
    memory: WorkerMemory
    num_recalled: int

    @property
    def arenas(self) -> dict[str, Arena]:
        return self.memory.arenas


def make_owners(outbox: Outbox, transfer: TransferConfig, clock: Clock) -> Owners:
    """The routers' leases on a worker's requests."""
    return Owners(outbox, clock, transfer.lease_s, transfer.orphan_grace_s)


def build_token_engine(
    config: WorkerConfig,
    backend: Backend,
    environment: Environment,
    store_calls: StoreCalls | None,
    fatal: Callable[[BaseException], None],
) -> TokenEngine:
    """Everything but the puller and the wire. Loads the weights. Raises ConfigError for a KV cache too small
    to serve anything; one that holds less than the wanted context is said in the log."""
    spec = backend.cache_spec(config.kv.block_size)
    limits = _limits(config, backend)
    num_blocks = capacity.kv_blocks(config.kv, spec)
    memory = make_memory(config, backend, environment.incarnation)
    hasher = BlockHasher(backend.identity, spec.block_size, bits=config.kv.hash_bits)
    kv = KVCacheManager(
        spec,
        [num_blocks] * len(spec.groups),
        hasher,
        memory.generations(),
        prefix_caching=config.kv.prefix_caching,
        ledgers=memory.ledgers,
    )
    num_recalled = memory.recall(kv)
    inbox, outbox = Inbox(), Outbox()
    desk = PullDesk(inbox)
    costs = TierCosts(environment.clock, limits.max_num_batched_tokens)
    deadline_s = config.transfer.deadline_s
    ec_cache = _ec_cache(memory.arenas["ec"], config.encoder.rows_per_block)
    leases = LeaseTable(environment.clock, config.transfer.lease_s)
    owners = make_owners(outbox, config.transfer, environment.clock)
    parts = EngineParts(
        model=backend.identity.model,
        max_model_len=limits.max_model_len,
        scheduler=Scheduler(limits, kv, backend.eos_token_ids),
        kv=kv,
        desk=desk,
        outflow=Outflow(kv, leases, owners.emit, environment.failpoints),
        embeddings=Embeddings(ec_cache, desk, environment.tracer, deadline_s, backend.row_bytes),
        store=_store_link(store_calls, kv, hasher, desk, inbox, costs, deadline_s),
        spans=RequestSpans(environment.tracer),
        entropy=environment.entropy,
        failpoints=environment.failpoints,
        spoil=lambda group, block_id: _flip_byte(memory, group, block_id),
        inbox=inbox,
        outbox=outbox,
        owners=owners,
        incarnation=environment.incarnation,
    )

    def make_intake(core: EngineCore) -> Intake:
        return Intake(
            kv, desk, owners.emit, environment.tracer, deadline_s, arrived=core.arrived, lost=core.lost
        )

    core = EngineCore(parts, make_intake)
    runner = backend.runner(spec, memory.for_runner(config.encoder.rows_per_block), limits)
    loop = EngineLoop(core, parts.scheduler, runner, inbox, outbox, environment.clock, costs, fatal)
    return TokenEngine(core, loop, desk, memory, num_recalled)


def max_model_len(config: WorkerConfig, backend: Backend) -> int:
    """Tokens of the longest sequence: as configured, as the model allows, and never more than the pool
    holds. Raises ConfigError when it holds none."""
    return _context(config, backend).served


def _context(config: WorkerConfig, backend: Backend) -> capacity.Context:
    return capacity.context(config, backend.cache_spec(config.kv.block_size), backend.max_model_len)


def _limits(config: WorkerConfig, backend: Backend) -> SchedulerLimits:
    """The scheduler's limits; a context shorter than wanted is said in the log."""
    context = _context(config, backend)
    if context.shortfall:
        log.warning(
            "the KV cache holds less than the wanted context",
            configured=context.source,
            served_context=context.served,
            wanted_context=context.wanted,
        )
    return SchedulerLimits(
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=context.served,
    )


def _ec_cache(arena: Arena, rows_per_block: int) -> EncoderCache:
    return EncoderCache(BlockPool(arena.info.num_blocks[0], arena.generations(0)), rows_per_block)


def _store_link(
    calls: StoreCalls | None,
    kv: KVCacheManager,
    hasher: BlockHasher,
    desk: PullDesk,
    inbox: Inbox,
    costs: TierCosts,
    deadline_s: float,
) -> StoreLink:
    if calls is None:
        return StoreLink()
    return RemoteStoreLink(
        calls,
        kv,
        hasher,
        desk,
        inbox,
        costs=costs,
        deadline_s=deadline_s,
        max_offered_blocks=MAX_OFFERED_BLOCKS,
    )


def _flip_byte(memory: WorkerMemory, group: int, block_id: int) -> None:
    ranks_of(memory.arenas, "kv")[0].block(group, block_id)[0] ^= 0xFF
