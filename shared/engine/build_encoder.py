"""Builds the engine of an encoder from its configuration, and the thread that runs it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shared.clock import Clock
from shared.config.services import WorkerConfig
from shared.engine.backend import Backend
from shared.engine.build import Environment, make_owners
from shared.engine.desk import PullDesk
from shared.engine.embedding_store import EmbeddingCalls, EmbeddingLink, RemoteEmbeddingLink
from shared.engine.encoder_core import EncoderCore, EncoderParts, MediaPreparer
from shared.engine.inbox import Inbox, Outbox
from shared.engine.media import MediaFormat
from shared.engine.memory import make_ec_arena, runner_memory
from shared.engine.thread import STATUS_INTERVAL_S, EngineThread
from shared.engine.tier_costs import TierCosts
from shared.kv_cache.block_pool import BlockPool
from shared.kv_cache.encoder_cache import EncoderCache
from shared.kv_cache.leases import LeaseTable
from shared.runner.base import EncoderRunner
from shared.scheduler.encoder_scheduler import EncoderLimits, EncoderScheduler
from shared.transfer.arena import Arena
from shared.types.transfer import AgentInfo

#: Embedding rows that one encoder step may produce.
MAX_STEP_ROWS = 4096


class EncoderLoop(EngineThread):
    """Owns the encoder's thread: commands, then one batch, then events."""

    def __init__(
        self,
        core: EncoderCore,
        runner: EncoderRunner,
        inbox: Inbox,
        outbox: Outbox,
        clock: Clock,
        fatal: Callable[[BaseException], None],
    ) -> None:
        super().__init__(core, runner, inbox, outbox, clock, fatal)
        self._core = core

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._inbox.run()
            self._core.tick()
            worked = self._core.step()
            self._report()
            self._outbox.flush()
            if not worked:
                self._inbox.wait(STATUS_INTERVAL_S)


@dataclass(frozen=True)
class EncoderEngine:
    """A built encoder. ``desk`` hears of pulls, and of readers' notifications."""

    core: EncoderCore
    loop: EncoderLoop
    desk: PullDesk
    arenas: dict[str, Arena]
    preparer: MediaPreparer


def build_encoder_engine(
    config: WorkerConfig,
    backend: Backend,
    environment: Environment,
    event_loop: asyncio.AbstractEventLoop,
    agent: Callable[[], AgentInfo],
    fatal: Callable[[BaseException], None],
    calls: EmbeddingCalls | None = None,
) -> EncoderEngine:
    """Everything but the wire. Loads the weights. ``agent`` is asked at each handoff; ``calls`` reach a
    kv_store, None: there is none. Raises ConfigError for a memory of less than a block of embeddings."""
    arena = make_ec_arena(config.encoder, backend.row_bytes, environment.incarnation)
    arenas = {"ec": arena}
    pool = BlockPool(arena.info.num_blocks[0], arena.generations(0))
    runner = backend.encoder_runner(runner_memory(arenas, config.encoder.rows_per_block))
    inbox, outbox = Inbox(), Outbox()
    desk = PullDesk(inbox)
    cache = EncoderCache(pool, config.encoder.rows_per_block)
    store = EmbeddingLink()
    if calls is not None:
        costs = TierCosts(environment.clock, MAX_STEP_ROWS)
        form = MediaFormat(Path(config.model.path), config.encoder, backend.row_bytes, backend.row_dtype)
        store = RemoteEmbeddingLink(
            calls,
            cache,
            pool,
            desk,
            inbox,
            form,
            agent,
            costs=costs,
            deadline_s=config.transfer.deadline_s,
        )
    preparer = backend.preparer(config.encoder, event_loop)
    parts = EncoderParts(
        scheduler=EncoderScheduler(EncoderLimits(MAX_STEP_ROWS, config.encoder.max_batch_items)),
        cache=cache,
        runner=runner,
        preparer=preparer,
        leases=LeaseTable(environment.clock, config.transfer.lease_s),
        agent=agent,
        pool=pool,
        row_bytes=backend.row_bytes,
        dtype=backend.row_dtype,
        max_held_media_bytes=config.encoder.max_held_media_bytes,
        tracer=environment.tracer,
        clock=environment.clock,
        failpoints=environment.failpoints,
        inbox=inbox,
        outbox=outbox,
        owners=make_owners(outbox, config.transfer, environment.clock),
        incarnation=environment.incarnation,
        store=store,
    )
    core = EncoderCore(parts)
    desk.on_notified = core.verified
    loop = EncoderLoop(core, runner, inbox, outbox, environment.clock, fatal)
    return EncoderEngine(core, loop, desk, arenas, preparer)
