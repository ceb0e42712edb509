"""`make parity`: every way in which a request can run gives transformers' tokens and log-probabilities.

SmolLM2 in float32, through real processes and the HTTP API; greedy, 64 prompts of at least three blocks,
32 tokens each, and at every token the top 20 log-probabilities. Prints a table of cells and writes
bench/results/parity.json. Exits 1 when any answer differs or any cell cannot prove that it happened.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

os.environ["OMP_WAIT_POLICY"] = "passive"  # before anything imports torch

from models import build
from services.cli.demo import kv_group
from shared.clock import Clock, MonotonicClock
from shared.config.services import WorkerConfig
from tests.e2e import report
from tests.e2e.cells import (
    BLOCK_SIZE,
    Cell,
    ask_all,
    ask_and_kill,
    asked,
    fresh_trace,
    gained,
    migrated,
    prove_transfer,
)
from tests.e2e.completions import Asked
from tests.e2e.prompts import ROOT, make_prompts
from tests.e2e.reference import Answer, Step, compute
from tests.e2e.serving import Serving, serving

MODEL = ROOT / ".triptych" / "models" / "smollm2-135m"
VOCAB_SIZE = 49152
BATCH = 8
CHUNK = 32
WAVE, MAX_KILLS = 16, 12
#: Room for every prompt and answer; for three or four of them; for eight prompts, but not for their answers.
ROOMY, TIGHT, CROWDED = "kv.memory_mb=1024", "decode:kv.num_blocks=48", "decode:kv.num_blocks=100"


@dataclass
class Parity:
    """A run: what is asked, what is right, and the cells so far."""

    prompts: list[tuple[int, ...]]
    num_tokens: int
    clock: Clock = field(default_factory=MonotonicClock)
    references: list[list[Step]] = field(default_factory=list)
    first: Sequence[Answer] = ()
    cells: list[Cell] = field(default_factory=list)

    @contextmanager
    def deployment(self, topology: str, *overrides: str) -> Iterator[Serving]:
        with tempfile.TemporaryDirectory(prefix="parity-") as state:
            say(f"starting {topology} {' '.join(overrides)}")
            with serving(MODEL, Path(state), topology, overrides) as deployment:
                yield deployment

    def requests(self, salt: str) -> list[Asked]:
        return asked(self.prompts, self.num_tokens, salt)

    async def cell(
        self, name: str, deployment: Serving, requests: Sequence[Asked], at_a_time: int
    ) -> tuple[Cell, list[Answer]]:
        """Ask everything and compare."""
        say(name)
        started = self.clock.now()
        answers = await ask_all(deployment, MODEL, requests, at_a_time)
        seconds = self.clock.now() - started
        if not self.references:
            say("transformers, float32")
            drafts = [answer.token_ids for answer in answers]
            self.references = await asyncio.to_thread(compute, MODEL, self.prompts, drafts)
        return self.judged(name, answers, seconds), answers

    def judged(self, name: str, answers: Sequence[Answer], seconds: float) -> Cell:
        cell = Cell(name, seconds=seconds)
        cell.judge(self.references, answers, VOCAB_SIZE)
        self.first = self.first or answers
        cell.bit_equal = sum(
            (a.logprobs, a.tops) == (b.logprobs, b.tops) for a, b in zip(answers, self.first, strict=True)
        )
        self.cells.append(cell)
        return cell


def say(text: str) -> None:
    print(f"parity: {text}", file=sys.stderr, flush=True)


async def roomy(run: Parity) -> None:
    """One worker with room for everything: alone, after a prefix hit, in batches."""
    with run.deployment("e=0,p=0,d=1,s=0", ROOMY) as deployment:
        start = deployment.metrics("decode-0")
        cell, answers = await run.cell("aggregated, alone", deployment, run.requests("alone"), 1)
        alone = deployment.metrics("decode-0")
        steps = gained(start, alone, "triptych_steps_total")
        cell.prove(f"{steps} steps for {cell.tokens} tokens", steps >= cell.tokens)

        cell, answers = await run.cell("after a prefix hit", deployment, run.requests("alone"), BATCH)
        hits = sum(answer.cached_tokens > 0 for answer in answers)
        cached = sum(answer.cached_tokens for answer in answers)
        cell.prove(f"{hits} of {len(answers)} with cached tokens, {cached} in all", hits == len(answers))

        before = deployment.metrics("decode-0")
        cell, _ = await run.cell(f"in a batch of {BATCH}", deployment, run.requests("batch"), BATCH)
        batched = deployment.metrics("decode-0")
        steps = gained(before, batched, "triptych_steps_total")
        cell.prove(f"{steps} steps for {cell.tokens} tokens", steps * 2 < cell.tokens)


async def beside_a_store(run: Parity) -> None:
    """One worker with small steps that soon forgets, and a store that does not."""
    overrides = (TIGHT, f"scheduler.max_num_batched_tokens={CHUNK}", "kv_store:kv.memory_mb=2048")
    with run.deployment("e=0,p=0,d=1,s=1", *overrides) as deployment:
        start = deployment.metrics("decode-0")
        cell, _ = await run.cell("chunked prompts", deployment, run.requests("store"), 2)
        chunked = deployment.metrics("decode-0")
        steps = gained(start, chunked, "triptych_step_tokens_count")
        small = gained(start, chunked, "triptych_step_tokens_bucket", le=f"{CHUNK}.0")
        cell.prove(f"{small} of {steps} steps of at most {CHUNK} tokens", 0 < small == steps)

        cell, answers = await run.cell("after a kv_store hit", deployment, run.requests("store"), 2)
        hits = gained(chunked, deployment.metrics("decode-0"), "triptych_kv_store_hits_total")
        found = sum(answer.cached_tokens > 0 for answer in answers)
        cached = sum(answer.cached_tokens for answer in answers)
        cell.prove(
            f"{found} of {len(answers)} found, {cached} tokens in {hits} blocks of the store",
            found == len(answers) and cached == hits * BLOCK_SIZE,
        )


async def crowded(run: Parity) -> None:
    """One worker that lets several prompts in at once and has hardly room for their answers."""
    with run.deployment("e=0,p=0,d=1,s=0", CROWDED, "scheduler.max_num_batched_tokens=512") as deployment:
        cell, _ = await run.cell("after preemption", deployment, run.requests("crowded"), 2 * BATCH)
        count = int(deployment.metrics("decode-0").value("triptych_preemptions_total"))
        cell.prove(f"{count} preemptions", count > 0)


async def apart(run: Parity, backend: str, *, kill: bool) -> None:
    """Prefill and decode on workers of their own, over one transfer backend."""
    with run.deployment("e=0,p=1,d=1,s=0", f"transfer.order={backend}", ROOMY) as deployment:
        decode = deployment.spec("decode-0").config
        if not isinstance(decode, WorkerConfig):
            raise TypeError("decode workers have a WorkerConfig")
        extent_bytes = kv_group(decode).extent_bytes(BLOCK_SIZE)
        requests = run.requests(backend)
        cell, _ = await run.cell(f"prefill / decode over {backend}", deployment, requests, BATCH)
        prove_transfer(cell, deployment, requests, extent_bytes, backend)
        if kill:
            await killed(run, deployment, backend)


async def killed(run: Parity, deployment: Serving, salt: str) -> None:
    """SIGKILL to the decode worker, wave after wave, until it has struck every stream in its middle."""
    name = "decode killed in mid-stream"
    say(name)
    started = run.clock.now()
    answers: dict[int, Answer] = {}
    waiting = list(enumerate(run.requests(salt)))
    kills, moved = 0, 0
    while waiting and kills < MAX_KILLS:
        # Traces of their own; the same salt, so that prefill is quick and all streams run at once.
        wave = [(i, fresh_trace(request, f"{kills}")) for i, request in waiting[:WAVE]]
        requests = [request for _, request in wave]
        got, seen, pid = await ask_and_kill(deployment, MODEL, requests, "decode-0")
        kills += 1
        struck = migrated(deployment, requests, seen)
        moved += len(struck)
        answers |= {i: answer for (i, _), answer in zip(wave, got, strict=True)}
        waiting = waiting[WAVE:] + [(i, request) for i, request in wave if request.trace_id not in struck]
        await deployment.until_back("decode-0", pid)
    cell = run.judged(name, [answers[i] for i in sorted(answers)], run.clock.now() - started)
    cell.prove(f"{moved} went on elsewhere after {kills} kills", moved == len(run.prompts))


async def run_all(run: Parity) -> None:
    await roomy(run)
    await beside_a_store(run)
    await crowded(run)
    await apart(run, "shm", kill=True)
    await apart(run, "tcp", kill=False)
    await apart(run, "nixl", kill=False)


def main(argv: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was started is stopped
    parser = argparse.ArgumentParser(prog="make parity", description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "parity.json")
    args = parser.parse_args(argv)
    if not build.is_complete(MODEL, text_only=True):
        build.build(MODEL, text_only=True)
    run = Parity(make_prompts(MODEL, args.prompts), args.tokens)
    started = run.clock.now()
    asyncio.run(run_all(run))
    seconds = run.clock.now() - started
    report.show(run.cells, seconds)
    report.write(args.out, MODEL.name, args.prompts, args.tokens, run.cells, seconds)
    return 1 if any(cell.problems for cell in run.cells) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
