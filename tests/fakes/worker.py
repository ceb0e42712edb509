"""A whole worker in this process: real engine thread, arenas and puller; no wire, no weights."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

from shared.clock import Clock, CountingEntropy, MonotonicClock, SystemEntropy
from shared.config.services import (
    EncoderConfig,
    KVConfig,
    ModelConfig,
    RuntimeConfig,
    SchedulerConfig,
    TransferConfig,
    WorkerConfig,
)
from shared.engine.backend import load_backend
from shared.engine.build import Environment, build_token_engine
from shared.engine.build_encoder import build_encoder_engine
from shared.failpoints import Failpoints
from shared.telemetry.tracing import NullTracer
from shared.transfer.agent import TransferAgent
from shared.transfer.base import TransferBackend
from shared.transfer.puller import Puller
from shared.transfer.shm import ShmBackend
from shared.types.transfer import AgentInfo
from shared.types.worker import Command, Event, Status, WorkerStatus

ROUTER = "router"
WITNESS = Path(__file__).parents[2] / "models" / "witness"


class EventLog:
    """Collects a worker's events; ``wait_for`` blocks until one matches."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = threading.Condition()

    def deliver(self, batch: list[Event]) -> None:
        with self._changed:
            self.events.extend(event for event in batch if not isinstance(event, Status))
            self._changed.notify_all()

    def wait_for(self, matches: Callable[[Event], bool], timeout_s: float = 20.0) -> Event:
        """The first event that matches, seen already or coming; AssertionError after the timeout."""
        with self._changed:
            found = self._changed.wait_for(lambda: next(filter(matches, self.events), None), timeout_s)
        if found is None:
            raise AssertionError(f"no such event among {self.events}")
        return next(filter(matches, self.events))


def worker_config(kind: str, **sections: object) -> WorkerConfig:
    """A small witness worker."""
    fields: dict[str, object] = {
        "scheduler": SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=16, max_model_len=512),
        "kv": KVConfig(block_size=16, num_blocks=64),
        "encoder": EncoderConfig(memory_mb=1, rows_per_block=4),
        "transfer": TransferConfig(order=("shm",)),
        "runtime": RuntimeConfig(),
    }
    fields.update(sections)
    return WorkerConfig(model=ModelConfig(str(WITNESS)), worker_id=f"{kind}-0", kind=kind, **fields)  # type: ignore[arg-type]


class InProcessWorker:
    """A token worker or an encoder. Use as a context manager."""

    def __init__(
        self,
        config: WorkerConfig,
        *,
        clock: Clock | None = None,
        failpoints: Failpoints | None = None,
        wrap: Callable[[TransferBackend], TransferBackend] = lambda backend: backend,
    ) -> None:
        self.config = config
        self.fatal: BaseException | None = None
        incarnation = SystemEntropy().hex_id()
        environment = Environment(
            clock or MonotonicClock(),
            CountingEntropy(),
            failpoints or Failpoints(),
            NullTracer(),
            incarnation,
        )
        self.backend = load_backend(config.model, config.runtime)
        self.log = EventLog()
        self._agent: TransferAgent | None = None
        self._event_loop = asyncio.new_event_loop()
        engine = (
            build_encoder_engine(
                config, self.backend, environment, self._event_loop, self.agent_info, self._fatal
            )
            if config.kind == "encoder"
            else build_token_engine(config, self.backend, environment, None, self._fatal)
        )
        self.engine = engine
        self.arenas = engine.arenas
        self._agent = TransferAgent(
            config.worker_id, incarnation, [wrap(ShmBackend())], engine.arenas, config.transfer.order
        )
        self.puller = Puller(
            self._agent,
            deliver=engine.desk.deliver,
            notified=engine.desk.notified,
            settled=engine.desk.settle,
            clock=environment.clock,
            deadline_s=config.transfer.deadline_s,
            failpoints=environment.failpoints,
            verify=config.kv.verify,
        )
        engine.desk.bind(self.puller)
        self._agent.set_epoch(1)
        engine.core.subscribe(ROUTER, self.log.deliver)
        engine.loop.start()

    def agent_info(self) -> AgentInfo:
        assert self._agent is not None
        return self._agent.info(self.backend.layout(self.config.kv.block_size))

    def send(self, *commands: Command) -> None:
        self.engine.core.submit(ROUTER, list(commands))

    def status(self) -> WorkerStatus:
        return self.engine.core.status()

    def wait(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Wait until a condition of the engine holds, looked at in its own thread."""
        done = threading.Event()
        parts = self.engine.core._p
        waits = int(timeout_s / 0.005)
        for _ in range(waits):
            parts.inbox.post(lambda: done.set() if condition() else None)
            if done.wait(0.005):
                return
        raise AssertionError("the condition never held")

    def _fatal(self, error: BaseException) -> None:
        self.fatal = error

    def __enter__(self) -> InProcessWorker:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.engine.loop.stop()
        self.puller.close()
        assert self._agent is not None
        self._agent.close()
        for arena in self.arenas.values():
            arena.close()
        self._event_loop.close()
        if self.fatal is not None:
            raise self.fatal
