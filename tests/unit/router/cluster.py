"""A dispatcher and scripted workers on one manual clock, and what a client of them sees."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.router.dispatch import Dispatcher
from services.router.model import ServedModel, load_model
from shared.clock import CountingEntropy, ManualClock
from shared.config.services import LimitsConfig, ModelConfig, RoutingConfig
from shared.errors import TriptychError
from shared.telemetry.tracing import NullTracer
from shared.types.inference import Accepted, Delta, InferenceRequest, Usage
from shared.types.transfer import AgentInfo
from shared.types.worker import WorkerInfo
from tests.unit.router.scripted_worker import EOS, ScriptedWorker, finish_reason, next_token

WITNESS = Path(__file__).resolve().parents[3] / "models" / "witness"
LEASE_S = 6.0


@functools.cache
def witness_model() -> ServedModel:
    return load_model(ModelConfig(str(WITNESS)), LimitsConfig(), created=7)


def oracle(
    request: InferenceRequest, prompt: Sequence[int], choice: int, seed: int, media: Sequence[str] = ()
) -> tuple[list[int], str]:
    """The tokens of one choice in a run without faults, and how it finishes."""
    history, sampling = list(prompt), request.sampling
    while True:
        history.append(next_token(history, media, seed, choice))
        emitted = history[len(prompt) :]
        reason = finish_reason(emitted, sampling)
        if reason:
            return emitted, reason


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

    def __init__(
        self,
        kinds: str = "epd",
        *,
        routing: RoutingConfig | None = None,
        limits: LimitsConfig | None = None,
    ) -> None:
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
        worker.heartbeat()
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
