"""Witness runner alone: tokens a second of a decode batch, and of its parts. Prints one JSON line.

python tests/bench/bench_witness.py [--batch 32] [--context 512] [--steps 300]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from shared.runner.witness import WitnessRunner
from shared.runner.witness_config import WitnessConfig
from shared.runner.witness_oracle import WitnessOracle
from shared.step import LAST_SAMPLED, NewRow, RowStep, StepPlan
from shared.types.kv import KVCacheSpec, KVGroupSpec
from shared.types.request import SamplingParams

CONFIG = WitnessConfig()
BLOCK_SIZE = 16


def measure(sampling: SamplingParams, batch: int, context: int, steps: int) -> dict[str, float]:
    """Decode from ``context - steps`` to ``context`` tokens, every row at once."""
    group = KVGroupSpec(CONFIG.num_layers, CONFIG.num_kv_heads, 1, "uint64")
    blocks_a_row = -(-context // BLOCK_SIZE)
    arena = memoryview(bytearray(batch * blocks_a_row * group.extent_bytes(BLOCK_SIZE)))
    runner = WitnessRunner(CONFIG, KVCacheSpec(BLOCK_SIZE, (group,)), [arena])
    tables = [tuple(range(row, batch * blocks_a_row, batch)) for row in range(batch)]
    start = context - steps
    prompt = tuple(i % 256 for i in range(start))
    prefill = StepPlan(
        step_id=0,
        new_rows=tuple(NewRow(r, f"r{r}", 0, prompt, start, sampling) for r in range(batch)),
        rows=tuple(RowStep(r, 0, prompt, 0, (tables[r],), (r,)) for r in range(batch)),
    )
    decode = [
        StepPlan(
            step_id=n + 1,
            rows=tuple(RowStep(r, start + n, (LAST_SAMPLED,), 0, ((),), (r,)) for r in range(batch)),
        )
        for n in range(steps)
    ]
    began = time.perf_counter()
    runner.execute(prefill).result()
    prefilled = time.perf_counter()
    for plan in decode:
        runner.execute(plan).result()
    seconds = time.perf_counter() - prefilled
    runner.close()
    return {
        "decode_tokens_per_s": round(batch * steps / seconds),
        "step_us": round(seconds / steps * 1e6, 1),
        "prefill_tokens_per_s": round(batch * start / (prefilled - began)),
    }


def measure_oracle(sampling: SamplingParams, context: int) -> int:
    """Tokens a second of the oracle, up to ``context`` tokens."""
    oracle = WitnessOracle(CONFIG)
    began, emitted = time.perf_counter(), 0
    for seed in range(20):
        emitted += len(oracle.generate([seed], sampling, max_model_len=context).token_ids)
    return round(emitted / (time.perf_counter() - began))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    greedy = SamplingParams(max_tokens=0, temperature=0.0, ignore_eos=True)
    drawn = SamplingParams(max_tokens=0, temperature=1.0, ignore_eos=True)
    report: dict[str, object] = {
        "bench": "witness",
        "batch": args.batch,
        "context": args.context,
        "greedy": measure(greedy, args.batch, args.context, args.steps),
        "temperature_1": measure(drawn, args.batch, args.context, args.steps),
        "oracle_greedy_tokens_per_s": measure_oracle(greedy, 256),
        "oracle_drawn_tokens_per_s": measure_oracle(drawn, 256),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
