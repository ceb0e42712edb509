"""One cell of the parity table: a way in which requests ran, the verdicts, the evidence that they did."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.cli.metrics_view import Samples
from services.cli.timeline import SpanRecord
from tests.e2e.completions import Asked, Completions
from tests.e2e.reference import Answer, Step, compare
from tests.e2e.serving import Serving

BLOCK_SIZE = 16
#: The first token is the prefill worker's, so whoever has so many is with decode.
MID_STREAM = 2


@dataclass
class Cell:
    """``evidence`` in words; ``problems`` empty when every answer is the reference's and proven.
    ``bit_equal``: answers whose log-probabilities are those of the first cell, to the last bit."""

    name: str
    prompts: int = 0
    tokens: int = 0
    max_difference: float = 0.0
    bit_equal: int = 0
    seconds: float = 0.0
    evidence: str = ""
    problems: list[str] = field(default_factory=list)

    def judge(self, references: Sequence[Sequence[Step]], answers: Sequence[Answer], vocab_size: int) -> None:
        """Compare every answer with its reference."""
        for index, (reference, answer) in enumerate(zip(references, answers, strict=True)):
            verdict = compare(reference, answer, vocab_size)
            self.prompts += 1
            self.tokens += verdict.num_tokens
            self.max_difference = max(self.max_difference, verdict.max_difference)
            if verdict.problem:
                self.problems.append(f"prompt {index}: {verdict.problem}")

    def prove(self, evidence: str, holds: bool) -> None:
        """Note evidence; if it does not hold, the cell did not happen as it is named."""
        self.evidence = f"{self.evidence}; {evidence}" if self.evidence else evidence
        if not holds:
            self.problems.append(f"no proof: {evidence}")


def asked(prompts: Iterable[tuple[int, ...]], num_tokens: int, salt: str) -> list[Asked]:
    """Requests for prompts. The salt keeps a cell from finding what another cell has cached, and makes the
    ids of traces."""
    return [
        Asked(prompt, num_tokens, salt, hashlib.sha256(f"{salt}/{index}".encode()).hexdigest()[:32])
        for index, prompt in enumerate(prompts)
    ]


def fresh_trace(request: Asked, label: str) -> Asked:
    """The same request once more, under a trace of its own."""
    digest = hashlib.sha256(f"{request.trace_id}/{label}".encode()).hexdigest()
    return request._replace(trace_id=digest[:32])


async def ask_all(
    serving: Serving, model_dir: Path, requests: Sequence[Asked], at_a_time: int
) -> list[Answer]:
    """Answers in the order of the requests, which run ``at_a_time``."""
    slots = asyncio.Semaphore(at_a_time)
    async with serving.client() as http:
        completions = Completions(http, serving.model, model_dir)

        async def one(request: Asked) -> Answer:
            async with slots:
                return await completions.ask(request)

        return list(await asyncio.gather(*map(one, requests)))


async def ask_and_kill(
    serving: Serving, model_dir: Path, requests: Sequence[Asked], victim: str
) -> tuple[list[Answer], list[int], int]:
    """Stream all requests at once and kill a worker as soon as each is in mid-stream, or the first is about
    to end. Returns the answers, how many tokens each had when the worker was killed, and its pid."""
    counts = [0] * len(requests)
    ready = asyncio.Event()

    def on_tokens(index: int) -> Callable[[int], None]:
        def count(number: int) -> None:
            counts[index] = number
            if min(counts) >= MID_STREAM or max(counts) >= requests[index].num_tokens - 3:
                ready.set()

        return count

    async with serving.client() as http:
        completions = Completions(http, serving.model, model_dir)
        tasks = [
            asyncio.create_task(completions.stream(request, on_tokens(index)))
            for index, request in enumerate(requests)
        ]
        await ready.wait()
        killed = serving.kill(victim)
        seen = list(counts)
        return list(await asyncio.gather(*tasks)), seen, killed


def migrated(serving: Serving, requests: Sequence[Asked], seen: Sequence[int]) -> set[str]:
    """Trace ids of the requests that were in mid-stream when their worker was killed, and whose trace shows
    that another went on: it was given the prompt and at least the tokens seen."""
    lengths = {
        request.trace_id: len(request.prompt) + count
        for request, count in zip(requests, seen, strict=True)
        if MID_STREAM <= count < request.num_tokens
    }

    def moved(spans: Iterable[SpanRecord]) -> set[str]:
        return {
            span.trace_id
            for span in spans
            if span.trace_id in lengths and span.number("prompt_tokens") >= lengths[span.trace_id]
        }

    return moved(serving.wait_for_spans(lambda spans: len(moved(spans)) == len(lengths)))


def gained(before: Samples, after: Samples, name: str, **labels: str) -> int:
    """How much a counter grew."""
    return int(after.value(name, **labels) - before.value(name, **labels))


def prove_transfer(
    cell: Cell, serving: Serving, requests: Sequence[Asked], extent_bytes: int, backend: str
) -> None:
    """Each request's own trace must show that exactly the blocks which decode lacked were moved."""
    wanted = {
        (request.trace_id, name) for request in requests for name in ("kv.transfer", "prefill", "decode")
    }
    serving.wait_for_spans(lambda spans: wanted <= {(span.trace_id, span.name) for span in spans})
    total = 0
    proven = 0
    for request in requests:
        trace = {span.name: span for span in serving.trace(request.trace_id)}
        if not {"kv.transfer", "prefill", "decode"} <= trace.keys():
            continue
        span = trace["kv.transfer"]
        total += span.number("kv.bytes")
        proven += (
            0 < span.number("kv.bytes") == _bytes_due(span, len(request.prompt), extent_bytes)
            and span.attributes.get("transfer.backend") == backend
            and trace["prefill"].pid not in (0, trace["decode"].pid)
        )
    cell.prove(
        f"{proven} of {len(requests)} traces show their blocks moved by {backend}, {total:,} bytes",
        proven == len(requests),
    )


def _bytes_due(span: SpanRecord, num_tokens: int, extent_bytes: int) -> int:
    return (-(-num_tokens // BLOCK_SIZE) - span.number("kv.blocks_held")) * extent_bytes
