"""A cluster of scripted workers in this process, with a deterministic toy model.

They speak the commands and events of the worker stream and check what a router owes them: blocks
attached before the handoff, producers alive and not aborted while they are read, embeddings held.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.router.dispatch import Dispatcher
from services.router.model import ServedModel, load_model
from shared.clock import CountingEntropy, ManualClock
from shared.config.services import LimitsConfig, ModelConfig, RoutingConfig
from shared.errors import TriptychError, WorkerLost
from shared.telemetry.tracing import NullTracer
from shared.types.identity import IdentityKey, LayoutSpec
from shared.types.inference import Accepted, Delta, InferenceRequest, Usage
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

WITNESS = Path(__file__).resolve().parents[3] / "models" / "witness"
MODEL = "witness"
EOS = 258
BLOCK_SIZE = 4
IDENTITY = IdentityKey(MODEL, "r1", "t1", "uint64")
LAYOUT = LayoutSpec((KVGroupSpec(1, 2, 1, "uint64"),), BLOCK_SIZE)
LEASE_S = 6.0


@functools.cache
def witness_model() -> ServedModel:
    return load_model(ModelConfig(str(WITNESS)), LimitsConfig(), created=7)


def next_token(token_ids: Sequence[int], media: Sequence[str], seed: int, choice: int) -> int:
    """A letter, or the end once in a while: a function of the whole history."""
    digest = hashlib.sha256(repr((tuple(token_ids), tuple(media), seed, choice)).encode()).digest()
    return EOS if digest[0] < 6 else 97 + digest[1] % 26


def oracle(request: GenerationRequest | InferenceRequest, prompt: Sequence[int], choice: int, seed: int,
           media: Sequence[str] = ()) -> tuple[list[int], str]:  # fmt: skip
    """The tokens of one choice in a run without faults, and how it finishes."""
    history, sampling = list(prompt), request.sampling
    while True:
        history.append(next_token(history, media, seed, choice))
        emitted = history[len(prompt) :]
        reason = finish_reason(emitted, sampling)
        if reason:
            return emitted, reason


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
                self.info.incarnation, num_running=len(self.jobs) + self.other_load, draining=self.draining
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


@dataclass
class Answer:
    """What a client saw."""

    accepted: Accepted | None = None
    deltas: list[Delta] = field(default_factory=list)
    usage: Usage | None = None
    error: Exception | None = None

    def tokens(self, choice: int = 0) -> list[int]:
        return [t for d in self.deltas if d.choice == choice for t in d.token_ids]

    def text(self, choice: int = 0) -> str:
        return "".join(d.text for d in self.deltas if d.choice == choice)

    def finish(self, choice: int = 0) -> str:
        reasons = [d.finish_reason for d in self.deltas if d.choice == choice and d.finish_reason]
        assert len(reasons) <= 1
        return reasons[0] if reasons else ""


class Cluster:
    """A dispatcher and its workers on one manual clock."""

    def __init__(self, kinds: str = "epd", *, routing: RoutingConfig | None = None,
                 limits: LimitsConfig | None = None) -> None:  # fmt: skip
        self.clock = ManualClock(1000.0)
        self.incarnations: dict[str, ScriptedWorker] = {}
        self.workers: dict[str, ScriptedWorker] = {}
        limits = limits or LimitsConfig()
        self.dispatcher = Dispatcher(
            [witness_model()],
            self._dial,
            clock=self.clock,
            entropy=CountingEntropy(),
            tracer=NullTracer(),
            wall_clock=lambda: 1_700_000_000,
            routing=routing or RoutingConfig(),
            limits=limits,
            lease_s=LEASE_S,
        )
        self._kinds = kinds

    async def start(self) -> None:
        names = {"e": "encoder", "p": "prefill", "d": "decode"}
        for index, letter in enumerate(self._kinds):
            self.add(names[letter], f"{letter}{self._kinds[:index].count(letter)}")
        await self.settle()
        assert len(self.dispatcher.workers) == len(self._kinds)

    def add(self, kind: str, worker_id: str) -> ScriptedWorker:
        """A new incarnation, announced."""
        incarnation = f"i{len(self.incarnations)}"
        worker = ScriptedWorker(self, kind, worker_id, incarnation)
        self.incarnations[incarnation] = self.workers[worker_id] = worker
        self.dispatcher.workers.announced(worker.info)
        return worker

    def by_incarnation(self, agent: AgentInfo) -> ScriptedWorker:
        return self.incarnations[agent.incarnation]

    def _dial(self, info: WorkerInfo, number: int) -> ScriptedWorker:
        return self.incarnations[info.incarnation]

    def __getattr__(self, name: str) -> ScriptedWorker:
        try:
            return self.__dict__["workers"][name]
        except KeyError:
            raise AttributeError(name) from None

    async def settle(self, turns: int = 30) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)

    async def pass_time(self, seconds: float = 0.1) -> None:
        """Heartbeats, then time, then a tick."""
        for worker in self.workers.values():
            worker.heartbeat()
        await self.settle()
        self.clock.advance(seconds)
        self.dispatcher.tick()
        await self.settle()

    async def ask(self, request: InferenceRequest, *, limit: int | None = None) -> Answer:
        """Serve a request to its end, letting time pass; the client leaves after ``limit`` deltas."""
        answer = Answer()
        task = asyncio.create_task(self.consume(request, answer, limit))
        await self.finish(task)
        return answer

    async def finish(self, *tasks: asyncio.Task[None]) -> None:
        while not all(task.done() for task in tasks):
            census = self.dispatcher.census()
            if census["flights"] or census["queued"]:
                await self.pass_time()
            else:
                await asyncio.sleep(0)
        await self.settle()
        for task in tasks:
            task.result()

    async def consume(self, request: InferenceRequest, answer: Answer, limit: int | None = None) -> None:
        stream = self.dispatcher.generate(request)
        try:
            async for outputs in stream:
                for output in outputs:
                    if isinstance(output, Accepted):
                        assert answer.accepted is None and not answer.deltas
                        answer.accepted = output
                    elif isinstance(output, Usage):
                        assert answer.usage is None
                        answer.usage = output
                    else:
                        assert answer.accepted is not None and answer.usage is None
                        answer.deltas.append(output)
                if limit is not None and len(answer.deltas) >= limit:
                    return
        except TriptychError as error:
            answer.error = error
        finally:
            await stream.aclose()

    def check_clean(self) -> None:
        """Nothing is left anywhere."""
        assert not any(self.dispatcher.census().values()), self.dispatcher.census()
        for worker in self.incarnations.values():
            if worker.alive and not worker.frozen:
                assert not worker.jobs and not worker.holds, worker.info.worker_id

    def check_exact(self, answer: Answer, request: InferenceRequest, media: Sequence[str] = ()) -> None:
        """Every choice is the oracle's, complete, once."""
        assert answer.error is None and answer.accepted is not None
        total = 0
        for choice in range(request.n):
            prompt = answer.accepted.prompt_token_ids
            tokens, reason = oracle(request, prompt, choice, answer.accepted.seed, media)
            assert answer.tokens(choice) == tokens
            assert answer.finish(choice) == reason
            assert answer.text(choice) == "".join(map(chr, (t for t in tokens if t != EOS)))
            total += len(tokens)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == total
        assert answer.usage.prompt_tokens == len(answer.accepted.prompt_token_ids)
