"""Scripted workers with a deterministic toy model.

They speak the commands and events of the worker stream and check what a router owes them: blocks
attached before the handoff, producers alive and not aborted while they are read, embeddings held.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shared.errors import TriptychError, WorkerLost
from shared.types.identity import IdentityKey, LayoutSpec
from shared.types.kv import KVGroupSpec
from shared.types.request import GenerationRequest, SamplingParams
from shared.types.transfer import AgentInfo, BlockRef, EcTransferParams
from shared.types.worker import (
    AGGREGATED,
    DECODE,
    Abort,
    Attach,
    BlocksCommitted,
    Command,
    Encode,
    Event,
    Failed,
    HandoffReady,
    Reserved,
    Resume,
    Start,
    Status,
    Tokens,
    WorkerInfo,
    WorkerStatus,
)

if TYPE_CHECKING:
    from tests.unit.router.cluster import Cluster

MODEL = "witness"
EOS = 258
BLOCK_SIZE = 4
IDENTITY = IdentityKey(MODEL, "r1", "t1", "uint64")
LAYOUT = LayoutSpec((KVGroupSpec(1, 2, 1, "uint64"),), BLOCK_SIZE)


def next_token(token_ids: Sequence[int], media: Sequence[str], seed: int, choice: int) -> int:
    """A letter, or the end once in a while: a function of the whole history."""
    digest = hashlib.sha256(repr((tuple(token_ids), tuple(media), seed, choice)).encode()).digest()
    return EOS if digest[0] < 6 else 97 + digest[1] % 26


def finish_reason(emitted: Sequence[int], sampling: SamplingParams) -> str:
    if (emitted[-1] == EOS and not sampling.ignore_eos) or emitted[-1] in sampling.stop_token_ids:
        return "stop"
    return "length" if len(emitted) >= sampling.max_tokens else ""


@dataclass
class Job:
    """A request at one worker: tokens a choice, and what was attached."""

    start: Start
    tokens: dict[int, list[int]] = field(default_factory=dict)
    attached: set[int] = field(default_factory=set)
    producer: AgentInfo | None = None

    @property
    def request(self) -> GenerationRequest:
        return self.start.request


class ScriptedWorker:
    """One incarnation of one worker, and the link to it. ``hook`` sees each event before it leaves
    and may return False to swallow it, or kill this or another worker."""

    def __init__(self, cluster: Cluster, kind: str, worker_id: str, incarnation: str) -> None:
        self.cluster = cluster
        agent = AgentInfo(worker_id, incarnation, 1, (), (), LAYOUT)
        self.info = WorkerInfo(
            worker_id,
            incarnation,
            kind,
            f"{worker_id}:{incarnation}",
            MODEL,
            IDENTITY,
            agent,
            BLOCK_SIZE,
            4096,
        )
        self.commands: list[Command] = []
        self.jobs: dict[str, Job] = {}
        self.holds: dict[str, tuple[str, ...]] = {}
        self.media: dict[str, bytes] = {}
        self.alive = True
        self.frozen = False
        self.draining = False
        self.other_load = 0
        self.num_blocks_free = 1000
        self.hook: Callable[[Event], bool | None] = lambda event: True
        self.put_error: TriptychError | None = None
        self._queue: asyncio.Queue[list[Event] | None] = asyncio.Queue()
        self._batch: list[Event] = []
        self._steps = 0

    # The link.

    async def connect(self) -> WorkerInfo:
        if not self.alive:
            raise WorkerLost("refused")
        return self.info

    def send(self, *commands: Command) -> None:
        for command in commands:
            self.commands.append(command)
            if self.alive and not self.frozen:
                self._handle(command)

    async def events(self) -> AsyncIterator[list[Event]]:
        while True:
            batch = await self._queue.get()
            if batch is None:
                raise WorkerLost("stream ended")
            yield batch

    async def put_media(self, mm_hash: str, data: bytes) -> None:
        await asyncio.sleep(0)
        if not self.alive:
            raise WorkerLost("gone")
        if self.put_error is not None:
            raise self.put_error
        self.media[mm_hash] = data

    async def close(self) -> None:
        self.jobs.clear()
        self.holds.clear()

    # Faults.

    def kill(self) -> None:
        """SIGKILL: nothing more leaves, the stream ends."""
        self.alive = False
        self.jobs.clear()
        self.holds.clear()
        self._queue.put_nowait(None)

    def emit(self, *events: Event) -> None:
        """Send events in one batch at the end of this turn, unless the hook objects."""
        for event in events:
            if self.alive and not self.frozen and self.hook(event) is not False and self.alive:
                if not self._batch:
                    asyncio.get_running_loop().call_soon(self._flush)
                self._batch.append(event)

    def heartbeat(self) -> None:
        if self.alive and not self.frozen:
            status = WorkerStatus(
                self.info.incarnation,
                num_running=len(self.jobs) + self.other_load,
                num_blocks=1000,
                num_blocks_free=self.num_blocks_free,
                draining=self.draining,
            )
            self._queue.put_nowait([Status(status)])

    def _flush(self) -> None:
        batch, self._batch = self._batch, []
        if self.alive and not self.frozen:
            self._queue.put_nowait(batch)

    # The worker.

    def _handle(self, command: Command) -> None:
        if isinstance(command, Start):
            self._start(command)
        elif isinstance(command, Encode):
            self._encode(command)
        elif isinstance(command, Attach):
            self._attach(command)
        elif isinstance(command, Resume):
            self._resume(command)
        elif isinstance(command, Abort) and command.choices:
            for choice in command.choices:
                self.jobs[command.request_id].tokens.pop(choice, None)
        elif isinstance(command, Abort):
            self.jobs.pop(command.request_id, None)
            self.holds.pop(command.request_id, None)

    def _start(self, start: Start) -> None:
        request = start.request
        job = self.jobs[request.request_id] = Job(start)
        history = list(request.token_ids)
        assert len(request.choices) == 1 or not request.num_emitted
        job.tokens = {c: list(history[request.num_prompt_tokens :]) for c in request.choices}
        if start.mode == DECODE:
            self.emit(Reserved(request.request_id, 0, -(-len(history) // BLOCK_SIZE)))
            return
        if not self._embeddings_readable(start):
            return
        loop = asyncio.get_running_loop()
        loop.call_soon(self._step if start.mode == AGGREGATED else self._prefill, request.request_id)

    def _embeddings_readable(self, start: Start) -> bool:
        wanted = {m.mm_hash: m.num_tokens for m in start.request.media}
        assert {e.mm_hash: e.num_rows for e in start.embeddings} == wanted
        for params in start.embeddings:
            producer = self.cluster.by_incarnation(params.producer)
            if not (producer.alive and start.request.request_id in producer.holds):
                self.fail(start.request.request_id, "peer_lost")
                return False
        return True

    def _encode(self, command: Encode) -> None:
        assert all(h in self.media for h in command.mm_hashes)
        self.holds[command.request_id] = command.mm_hashes
        params = tuple(
            EcTransferParams(
                f"ec-{command.request_id}-{h[:4]}", self.info.agent, h, 6, 64, "uint64", (0,), (1,), 7
            )
            for h in command.mm_hashes
        )
        self.emit(HandoffReady(command.request_id, f"ec-{command.request_id}", embeddings=params))

    def _prefill(self, request_id: str) -> None:
        job = self.jobs.get(request_id)
        if job is None:
            return
        handoff_id = f"kv-{request_id}"
        num_blocks = -(-len(job.request.token_ids) // BLOCK_SIZE)
        self.holds[request_id] = (handoff_id,)
        for first in range(0, num_blocks, 2):
            blocks = tuple(BlockRef(i, 1, (1, 2)) for i in range(first, min(first + 2, num_blocks)))
            self.emit(BlocksCommitted(request_id, handoff_id, 0, first, blocks))
        for choice in job.request.choices:
            self._sample(job, choice)
        self.emit(
            HandoffReady(request_id, handoff_id, num_blocks, num_cached_tokens=4 + job.request.num_emitted)
        )
        self.jobs.pop(request_id, None)

    def _attach(self, command: Attach) -> None:
        job = self.jobs.get(command.request_id)
        if job is not None:
            params = command.params
            job.producer = params.producer
            job.attached |= set(range(params.first, params.first + len(params.blocks)))

    def _resume(self, command: Resume) -> None:
        job = self.jobs.get(command.request_id)
        if job is None:
            return
        assert job.producer is not None and job.attached == set(range(command.num_blocks))
        finished = command.finished or (False,) * len(command.tokens)
        for choice, token, done in zip(job.request.choices, command.tokens, finished, strict=True):
            job.tokens[choice].append(token)
            if done:
                del job.tokens[choice]
        asyncio.get_running_loop().call_soon(self._pull, command.request_id)

    def _pull(self, request_id: str) -> None:
        job = self.jobs.get(request_id)
        if job is None or job.producer is None or not self.alive:
            return
        producer = self.cluster.by_incarnation(job.producer)
        if not (producer.alive and request_id in producer.holds):
            self.fail(request_id, "peer_lost")
        else:
            self._step(request_id)

    def _step(self, request_id: str) -> None:
        job = self.jobs.get(request_id)
        if job is None or not self.alive or self.frozen:
            return
        for choice in list(job.tokens):
            if self._sample(job, choice):
                job.tokens.pop(choice, None)
        if job.tokens:
            asyncio.get_running_loop().call_soon(self._step, request_id)
        else:
            self.jobs.pop(request_id, None)

    def _sample(self, job: Job, choice: int) -> str:
        request, emitted = job.request, job.tokens[choice]
        prompt = request.token_ids[: request.num_prompt_tokens]
        media = [m.mm_hash for m in request.media]
        token = next_token([*prompt, *emitted], media, request.sampling.seed, choice)
        emitted.append(token)
        reason = finish_reason(emitted, request.sampling)
        stop_id = token if reason == "stop" else None
        cached = 4 if job.start.mode == AGGREGATED else 0
        self.emit(Tokens(request.request_id, choice, len(emitted) - 1, (token,), (), reason, stop_id, cached))
        return reason

    def fail(self, request_id: str, code: str, *, retryable: bool = True) -> None:
        self.jobs.pop(request_id, None)
        self.holds.pop(request_id, None)
        self.emit(Failed(request_id, code, "scripted failure", retryable))

    def got(self, kind: type[Command]) -> list[Command]:
        return [c for c in self.commands if isinstance(c, kind)]
