"""Steps of the runner itself, host work and all: decode steps one behind the other, prefill by the chunk."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator

import torch
from msgspec import structs

from shared.runner.gpu.device import CudaDevice
from shared.runner.gpu.runner import GpuRunner
from shared.step import LAST_SAMPLED, NewRow, RowStep, StepPlan
from shared.types.kv import KVCacheSpec
from shared.types.request import SamplingParams
from tests.bench.figures import Figure
from tests.bench.gpu.shape import QWEN3_8B, random_weights

BLOCK, MAX_ROWS, POOL = 16, 256, 20480
GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0, ignore_eos=True)
#: (rows, context) and (rows, tokens): what vLLM 0.26.0 took on an H200 with these sizes, in ms and tokens/s,
#: and how much of it is the goal.
DECODE = {
    (1, 512): (5.19, 0.78),
    (16, 512): (5.64, 0.83),
    (64, 512): (6.82, 0.85),
    (256, 512): (14.35, 0.87),
    (32, 8192): (14.7, 0.90),
}
PREFILL = {
    (1, 512): (31_100, 1.0),
    (1, 2048): (39_900, 1.0),
    (1, 8192): (38_600, 0.95),
    (16, 4096): (41_300, 1.0),
}
CHUNK = 8192


class Bench:
    """A runner of the 8B shape over 48 GB of KV."""

    def __init__(self, *, batch_invariant: bool = False) -> None:
        spec = QWEN3_8B.kv_cache_spec(BLOCK)
        spec = KVCacheSpec(BLOCK, tuple(structs.replace(group, dtype="bfloat16") for group in spec.groups))
        kv = torch.empty(POOL, 8, 36, 2, BLOCK, 128, dtype=torch.bfloat16, device="cuda")
        for first in range(0, POOL, 512):
            kv[first : first + 512].normal_()
        began = time.perf_counter()
        self.runner = GpuRunner(
            QWEN3_8B,
            random_weights(QWEN3_8B),
            spec,
            [kv],
            CudaDevice(),
            max_rows=MAX_ROWS,
            max_model_len=8192 + 512,
            batch_invariant=batch_invariant,
        )
        torch.cuda.synchronize()
        self.build_s = time.perf_counter() - began
        self.free = torch.randperm(POOL).tolist()
        self.steps = 0

    def rows(self, count: int, past: int, room: int) -> tuple[StepPlan, list[tuple[int, ...]]]:
        """A plan that makes rows, computing nothing, and tables for ``past`` tokens and more."""
        per_row = -(-(past + room) // BLOCK)
        plan = StepPlan(
            0,
            free_rows=tuple(range(MAX_ROWS)),
            new_rows=tuple(NewRow(r, f"r{r}", 0, (1,) * 4, 1, GREEDY) for r in range(count)),
        )
        return plan, [tuple(self.free[r * per_row : (r + 1) * per_row]) for r in range(count)]

    def decode(self, count: int, context: int, num_steps: int) -> float:
        """Median milliseconds from one result to the next."""
        context -= num_steps * 2 // 3  # where the middle of what is measured is
        plan, tables = self.rows(count, context, num_steps + 64)
        self.runner.execute(plan).result()
        times = []
        pending = None
        for n in range(num_steps):
            rows = tuple(
                RowStep(
                    r, context + n, (5 if not n else LAST_SAMPLED,), 0, (tables[r] if not n else (),), (r,)
                )
                for r in range(count)
            )
            launched = self.runner.execute(StepPlan(n, rows=rows))
            if pending is not None:
                pending.result()
                times.append(time.perf_counter())
            pending = launched
        if pending is not None:
            pending.result()
        gaps = [b - a for a, b in itertools.pairwise(times)]
        return statistics.median(gaps[len(gaps) // 3 :]) * 1e3

    def prefill(self, count: int, tokens: int) -> float:
        """Tokens a second, median of five after one that compiles."""
        rates = []
        for _ in range(6):
            plan, tables = self.rows(count, tokens, 1)
            self.runner.execute(plan).result()
            torch.cuda.synchronize()
            began = time.perf_counter()
            pending = [self.runner.execute(plan) for plan in chunks(count, tokens, tables)]
            for step in pending:
                step.result()
            rates.append(count * tokens / (time.perf_counter() - began))
        return statistics.median(rates[1:])


def chunks(count: int, tokens: int, tables: list[tuple[int, ...]]) -> Iterator[StepPlan]:
    """Steps of at most CHUNK tokens, several short prompts in one."""
    together = max(1, CHUNK // tokens)
    for first in range(0, count, together):
        for at in range(0, tokens, CHUNK):
            stop = min(tokens, at + CHUNK)
            yield StepPlan(
                first,
                rows=tuple(
                    RowStep(
                        r,
                        at,
                        (7,) * (stop - at),
                        0,
                        (tables[r] if not at else (),),
                        (r,) if stop == tokens else (),
                    )
                    for r in range(first, min(count, first + together))
                ),
            )


def measure() -> list[Figure]:
    """Milliseconds a decode step, tokens a second of prefill."""
    bench = Bench()
    rows = [Figure("weights drawn, kernels compiled, graphs captured", bench.build_s, "s")]
    for (count, context), (vllm, ratio) in DECODE.items():
        value = bench.decode(count, context, 150)
        name = f"decode step, batch {count}, context {context}"
        rows.append(Figure(name, value, "ms", vllm * ratio, basis=f"{ratio} x vLLM's {vllm} ms"))
    for (count, tokens), (vllm, ratio) in PREFILL.items():
        value = bench.prefill(count, tokens)
        name = f"prefill, {count} x {tokens} tokens"
        basis = f"{ratio} x vLLM's {vllm / 1000:.1f} k"
        rows.append(Figure(name, value, "tokens/s", vllm * ratio, at_most=False, basis=basis))
    return rows


def invariant() -> list[Figure]:
    """The same in batch-invariant mode, beside the fast kernels in the same process."""
    rows: list[Figure] = []
    fast: dict[str, float] = {}
    for batch_invariant in (False, True):
        bench = Bench(batch_invariant=batch_invariant)
        found = {f"decode step, batch {c}, context {x}": bench.decode(c, x, 150) for c, x in DECODE}
        found |= {f"prefill, {c} x {t} tokens": c * t / bench.prefill(c, t) * 1e3 for c, t in PREFILL}
        for name, value in found.items() if batch_invariant else ():
            ratio = value / fast[name]
            rows.append(Figure(f"batch-invariant: {name}", ratio, "x the fast kernels", 1.3))
        fast = found
        del bench
        torch.cuda.empty_cache()
    return rows
