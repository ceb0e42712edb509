"""The live view of the workers: one stream each, who is alive, who is suspect, what each last said.

Owns the connections and their liveness. It does not choose workers (``policy``) and knows
nothing of requests beyond the attempts that a worker carries, which the listener put there. All
methods are called on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from shared.clock import Clock
from shared.config.services import RoutingConfig
from shared.errors import TriptychError
from shared.routing.policy import WorkerView
from shared.telemetry import metrics
from shared.telemetry.logs import get_logger
from shared.types.worker import Abort, Command, Event, Status, WorkerInfo, WorkerStatus

logger = get_logger(__name__)

#: A pause of the router itself longer than this is not held against the workers.
OWN_PAUSE_S = 1.0
#: Pause between two tries to reach a worker.
RETRY_S = 0.5
#: Lost workers of which we remember what they were doing.
MAX_LEFT_BEHIND = 64
ROUTED_KINDS = frozenset({"encoder", "prefill", "decode"})


class WorkerLink(Protocol):
    """A connection to one worker. ``connect`` first; ``events`` once; raises TriptychError."""

    async def connect(self) -> WorkerInfo: ...

    def send(self, *commands: Command) -> None: ...

    def events(self) -> AsyncIterator[list[Event]]: ...

    async def put_media(self, mm_hash: str, data: bytes) -> None: ...

    async def close(self) -> None: ...


class Worker:
    """One incarnation of a worker, connected. ``attempts`` = the attempts it works for, by id."""

    def __init__(self, info: WorkerInfo, link: WorkerLink, now: float) -> None:
        self.info = info
        self.key = f"{info.worker_id}/{info.incarnation}"
        self.link = link
        self.status = WorkerStatus(info.incarnation)
        self.last_seen = now
        self.last_turn = now
        self.suspect = False
        self.lost = False
        self.attempts: dict[str, Any] = {}
        self.reader: asyncio.Task[None] | None = None

    @property
    def usable(self) -> bool:
        """Whether it may get new work."""
        return not (self.lost or self.suspect or self.status.draining)

    def heard(self, events: list[Event], now: float) -> None:
        """Take in what the worker says of itself. One that does not count turns is taken at its word."""
        self.last_seen = now
        for event in events:
            if type(event) is Status:
                if event.status.turns != self.status.turns or not event.status.turns:
                    self.last_turn = now
                self.status = event.status

    def judge(self, now: float, config: RoutingConfig) -> str:
        """Suspect the worker, or not; returns why it is to be given up, if it is."""
        silence, stall = now - self.last_seen, now - self.last_turn
        self.suspect = max(silence, stall) > config.suspect_s
        if silence > config.lost_s:
            return "silent"
        return "stalled" if stall > config.stall_s else ""

    def send(self, *commands: Command) -> None:
        """Queue commands; nothing happens when the worker is lost."""
        if not self.lost:
            self.link.send(*commands)

    def view(self) -> WorkerView:
        """What the policy sees."""
        info, status = self.info, self.status
        return WorkerView(
            self.key,
            info.kind,
            info.model,
            info.identity,
            info.agent.layout,
            info.block_size,
            max(status.num_running + status.num_waiting, len(self.attempts)),
            status.num_blocks,
            status.num_blocks_free,
        )


class WorkerListener(Protocol):
    """Who is told. ``deliver`` gets no events of a lost worker."""

    def deliver(self, worker: Worker, events: list[Event]) -> None: ...

    def worker_ready(self, worker: Worker) -> None: ...

    def worker_lost(self, worker: Worker) -> None: ...


class WorkerPool:
    """All workers that announced themselves. ``dial`` makes an unconnected link; its second
    argument is a number that grows with every dial, with which a worker fences older streams."""

    def __init__(
        self,
        dial: Callable[[WorkerInfo, int], WorkerLink],
        clock: Clock,
        listener: WorkerListener,
        config: RoutingConfig,
    ) -> None:
        self._dial = dial
        self._clock = clock
        self._listener = listener
        self._config = config
        self._workers: dict[str, Worker] = {}
        self._dialing: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._retry_at: dict[str, float] = {}
        self._left_behind: dict[str, tuple[Abort, ...]] = {}
        self._num_dials = 0
        self._last_tick = clock.now()

    def __len__(self) -> int:
        return len(self._workers)

    def live(self) -> list[Worker]:
        """Connected workers, suspects included."""
        return list(self._workers.values())

    def usable(self) -> dict[str, Worker]:
        """Workers that may get new work, by key."""
        return {w.key: w for w in self._workers.values() if w.usable}

    def announced(self, info: WorkerInfo) -> None:
        """A worker says that it is there, or the registry does; dials unless that is known.

        While a worker of this id is connected at the same address, its own stream tells the truth:
        a process that took its place there has ended that stream.
        """
        if info.kind not in ROUTED_KINDS or info.worker_id in self._dialing:
            return
        current = self._workers.get(info.worker_id)
        if current is not None and info.incarnation == current.info.incarnation:
            if info.agent.epoch > current.info.agent.epoch:
                current.info = info
            return
        if current is not None and info.address == current.info.address:
            return
        if self._clock.now() < self._retry_at.get(info.worker_id, 0.0):
            return
        self._num_dials += 1
        self._dialing.add(info.worker_id)
        task = asyncio.get_running_loop().create_task(self._serve(info, self._num_dials))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def withdrawn(self, worker_id: str, incarnation: str) -> None:
        """A worker says goodbye: it is lost from now on."""
        worker = self._workers.get(worker_id)
        if worker is not None and worker.info.incarnation == incarnation:
            self._lose(worker, "withdrawn")

    def tick(self) -> None:
        """Judge liveness by silence and standstill; call a few times a second."""
        now = self._clock.now()
        pause, self._last_tick = now - self._last_tick, now
        for worker in self.live():
            if pause > OWN_PAUSE_S:
                worker.last_seen += pause
                worker.last_turn += pause
            if reason := worker.judge(now, self._config):
                self._lose(worker, reason)

    async def close(self) -> None:
        """Close every stream; nobody is told. Calling it twice is safe."""
        for worker in self.live():
            worker.lost = True
        self._workers.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, info: WorkerInfo, dial_number: int) -> None:
        """The life of one connection: hello, events, end."""
        link = self._dial(info, dial_number)
        worker: Worker | None = None
        try:
            async with asyncio.timeout(self._config.lost_s):
                hello = await link.connect()
            worker = self._welcome(info, hello, link)
            self._dialing.discard(info.worker_id)
            if worker is not None:
                await self._read(worker)
        except (TriptychError, TimeoutError, OSError) as error:
            logger.info("worker stream ended", worker=info.worker_id, error=type(error).__name__)
        finally:
            self._dialing.discard(info.worker_id)
            self._retry_at[info.worker_id] = self._clock.now() + RETRY_S
            if worker is not None:
                self._lose(worker, "stream_end")
            await link.close()

    def _welcome(self, info: WorkerInfo, hello: WorkerInfo, link: WorkerLink) -> Worker | None:
        """Take a worker in; its predecessor of the same id is lost. None when it is not the one."""
        if hello.worker_id != info.worker_id or hello.kind not in ROUTED_KINDS:
            logger.warning("worker answered under another name", worker=info.worker_id)
            return None
        predecessor = self._workers.get(hello.worker_id)
        if predecessor is not None:
            self._lose(predecessor, "replaced")
        worker = Worker(hello, link, self._clock.now())
        worker.reader = asyncio.current_task()
        # The same process again, after a pause: what it still does for us is not wanted any more.
        worker.send(*self._left_behind.pop(worker.key, ()))
        self._workers[hello.worker_id] = worker
        metrics.WORKERS.labels(hello.kind).inc()
        self._listener.worker_ready(worker)
        return worker

    async def _read(self, worker: Worker) -> None:
        async for events in worker.link.events():
            now = self._clock.now()
            worker.heard(events, now)
            worker.judge(now, self._config)
            self._listener.deliver(worker, events)

    def _lose(self, worker: Worker, reason: str) -> None:
        """Fence a worker: nothing is sent to it or taken from it any more. Once a worker."""
        if worker.lost:
            return
        worker.lost = True
        if worker.attempts:
            self._left_behind[worker.key] = tuple(Abort(attempt_id) for attempt_id in worker.attempts)
            if len(self._left_behind) > MAX_LEFT_BEHIND:
                del self._left_behind[next(iter(self._left_behind))]
        logger.warning("worker lost", worker=worker.info.worker_id, reason=reason)
        metrics.WORKERS_LOST.labels(worker.info.kind, reason).inc()
        metrics.WORKERS.labels(worker.info.kind).dec()
        if self._workers.get(worker.info.worker_id) is worker:
            del self._workers[worker.info.worker_id]
        if worker.reader is not None and worker.reader is not asyncio.current_task():
            worker.reader.cancel()
        self._listener.worker_lost(worker)
