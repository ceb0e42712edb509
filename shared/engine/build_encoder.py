"""Builds the engine of an encoder from its configuration, and the thread that runs it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from shared.clock import Clock
from shared.config.services import WorkerConfig
from shared.engine.backend import Backend
from shared.engine.build import Environment, make_ec_arena, runner_memory
from shared.engine.encoder_core import EncoderCore, EncoderParts
from shared.engine.inbox import Inbox, Outbox
from shared.engine.loop import STATUS_INTERVAL_S
from shared.engine.observe import observe_status
from shared.kv_cache.block_pool import BlockPool
from shared.kv_cache.encoder_cache import EncoderCache
from shared.kv_cache.leases import LeaseTable
from shared.runner.base import EncoderRunner
from shared.scheduler.encoder_scheduler import EncoderLimits, EncoderScheduler
from shared.transfer.arena import Arena
from shared.types.transfer import AgentInfo
from shared.types.worker import Status

log = logging.getLogger(__name__)

#: Embedding rows that one encoder step may produce.
MAX_STEP_ROWS = 4096


class EncoderLoop:
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
        self._core = core
        self._runner = runner
        self._inbox = inbox
        self._outbox = outbox
        self._clock = clock
        self._fatal = fatal
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._main, name="encoder", daemon=True)
        self._next_status = 0.0

    def start(self) -> None:
        """Begin; the engine accepts commands at once."""
        self._thread.start()

    def stop(self) -> None:
        """Abort what runs and end the thread. Any other thread; twice is safe."""
        if self._stopping.is_set():
            return
        self._inbox.post(self._core.abort_all)
        self._stopping.set()
        self._inbox.post(lambda: None)
        self._thread.join()
        self._runner.close()

    def _main(self) -> None:
        try:
            while not self._stopping.is_set():
                self._turn()
        except Exception as error:
            log.exception("the encoder thread stopped")
            self._fatal(error)

    def _turn(self) -> None:
        self._inbox.run()
        self._core.tick()
        worked = self._core.step()
        if self._clock.now() >= self._next_status:
            self._next_status = self._clock.now() + STATUS_INTERVAL_S
            status = self._core.status()
            observe_status(status)
            self._outbox.emit(Status(status))
        self._outbox.flush()
        if not worked:
            self._inbox.wait(STATUS_INTERVAL_S)


@dataclass(frozen=True)
class EncoderEngine:
    """A built encoder."""

    core: EncoderCore
    loop: EncoderLoop
    inbox: Inbox
    arenas: dict[str, Arena]


def build_encoder_engine(
    config: WorkerConfig,
    backend: Backend,
    environment: Environment,
    event_loop: asyncio.AbstractEventLoop,
    agent: Callable[[], AgentInfo],
    fatal: Callable[[BaseException], None],
) -> EncoderEngine:
    """Everything but the wire. Loads the weights. ``agent`` is asked at each handoff."""
    arena = make_ec_arena(config.encoder, backend.row_bytes, environment.incarnation)
    arenas = {"ec": arena}
    pool = BlockPool(arena.info.num_blocks[0], arena.generations(0))
    runner = backend.encoder_runner(runner_memory(arenas, config.encoder.rows_per_block))
    inbox, outbox = Inbox(), Outbox()
    parts = EncoderParts(
        scheduler=EncoderScheduler(EncoderLimits(MAX_STEP_ROWS, config.encoder.max_batch_items)),
        cache=EncoderCache(pool, config.encoder.rows_per_block),
        runner=runner,
        preparer=backend.preparer(config.encoder, event_loop),
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
        incarnation=environment.incarnation,
    )
    core = EncoderCore(parts)
    return EncoderEngine(
        core, EncoderLoop(core, runner, inbox, outbox, environment.clock, fatal), inbox, arenas
    )
