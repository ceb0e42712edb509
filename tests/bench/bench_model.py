"""Model runner beside transformers in one run: decode, prefill, load time and memory. One JSON line.

OMP_WAIT_POLICY=passive python tests/bench/bench_model.py MODEL_DIR [--threads 2] [--reps 5] [--steps 30]

MODEL_DIR is a text model (``python -m models.build DIR --text-only``). Both sides take turns, so that
a busy machine slows both; the ratios of medians are what to look at.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from shared.models import weights
from shared.models.registry import load_config
from shared.runner.model_runner import ModelRunner
from shared.step import LAST_SAMPLED, NewRow, RowStep, StepPlan
from shared.types.request import SamplingParams

PROMPT, BATCH, BLOCK = 256, 8, 16
GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)


class Ours:
    """The model runner with a row for each prompt."""

    def __init__(self, model_dir: Path, cache: Path, threads: int, max_len: int) -> None:
        began = time.perf_counter()
        path = weights.prepare(model_dir, cache)
        self.prepare_s = time.perf_counter() - began
        config = load_config(model_dir)
        spec = config.kv_cache_spec(BLOCK)
        self._per_row = spec.num_blocks_for(max_len)
        arena = memoryview(bytearray(BATCH * self._per_row * spec.groups[0].extent_bytes(BLOCK)))
        before, began = pss_mb(), time.perf_counter()
        self._runner = ModelRunner(
            config, path, spec, [arena], max_rows=BATCH, max_model_len=max_len, num_threads=threads
        )
        self.load_s = time.perf_counter() - began
        self.prefill(0, [1, 2, 3])
        self.weights_mb = pss_mb() - before

    def prefill(self, row: int, prompt: list[int]) -> int:
        blocks = tuple(range(row * self._per_row, (row + 1) * self._per_row))
        new = NewRow(row, f"r{row}", 0, tuple(prompt), len(prompt), GREEDY)
        step = RowStep(row, 0, tuple(prompt), 0, (blocks,), (row,))
        return self._runner.execute(StepPlan(0, new_rows=(new,), rows=(step,))).result().token_ids[0]

    def decode(self, num_rows: int, position: int) -> tuple[int, ...]:
        rows = tuple(RowStep(r, position, (LAST_SAMPLED,), 0, ((),), (r,)) for r in range(num_rows))
        return self._runner.execute(StepPlan(0, rows=rows)).result().token_ids


class Theirs:
    """transformers: forward passes with its own cache, a static batch."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoModelForCausalLM

        before, began = pss_mb(), time.perf_counter()
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self.load_s = time.perf_counter() - began
        self.weights_mb = pss_mb() - before
        self._cache: Any = None
        self._last = torch.empty(0)

    @torch.inference_mode()
    def prefill(self, prompts: list[list[int]]) -> list[int]:
        self._cache = None
        return self._forward(torch.tensor(prompts))

    @torch.inference_mode()
    def decode(self) -> list[int]:
        return self._forward(self._last)

    def _forward(self, ids: torch.Tensor) -> list[int]:
        out = self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache = out.past_key_values
        self._last = out.logits[:, -1:].argmax(-1)
        return self._last[:, 0].tolist()


def pss_mb() -> float:
    """This process's proportional memory."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return round(int(line.split()[1]) / 1024, 1)
    return 0.0


def timed(action: Callable[[], object], into: list[float]) -> object:
    began = time.perf_counter()
    value = action()
    into.append((time.perf_counter() - began) * 1e3)
    return value


def row(ours: list[float], theirs: list[float]) -> dict[str, float]:
    a, b = statistics.median(ours), statistics.median(theirs)
    return {"ours_ms": round(a, 1), "transformers_ms": round(b, 1), "ratio": round(a / b, 3)}


def measure(ours: Ours, theirs: Theirs, reps: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    prompts = torch.randint(0, 49152, (BATCH, PROMPT)).tolist()
    table: dict[str, Any] = {}
    mine: list[float] = []
    other: list[float] = []
    for rep in range(reps + 1):
        timed(lambda: ours.prefill(0, prompts[0]), mine)
        timed(lambda: theirs.prefill(prompts[:1]), other)
        if rep == 0:
            mine.clear(), other.clear()
    table["prefill_256"] = row(mine, other)
    for batch in (1, BATCH):
        same = list(map(ours.prefill, range(batch), prompts)) == theirs.prefill(prompts[:batch])
        mine, other = [], []
        for step in range(steps):
            a = timed(lambda at=PROMPT + step, n=batch: ours.decode(n, at), mine)
            same &= list(a) == timed(theirs.decode, other)
        table[f"decode_batch_{batch}"] = {**row(mine[1:], other[1:]), "same_tokens": same}
    return table


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        ours = Ours(args.model_dir, Path(cache), args.threads, PROMPT + args.steps + 1)
        theirs = Theirs(args.model_dir)
        torch.set_num_threads(args.threads)  # ours has its own team
        result: dict[str, Any] = {"threads": args.threads, **measure(ours, theirs, args.reps, args.steps)}
    result["load_s"] = {
        "ours": round(ours.load_s, 2),
        "prepare_once": round(ours.prepare_s, 2),
        "transformers": round(theirs.load_s, 2),
    }
    result["weights_mb"] = {"ours_shared": ours.weights_mb, "transformers": theirs.weights_mb}
    result["load_average"] = os.getloadavg()[0]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
