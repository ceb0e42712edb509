"""`make bench`: runs the parts one after the other, keeps their results, and writes bench/README.md.

python -m tests.bench.run [--only PART ...] [--tables]

Each part is a program of its own, so that none measures what another left behind. Some keep their result
themselves; of those that print a JSON line, that line is turned into figures and kept here.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.bench.figures import README, ROOT, Figure, load, readme, record, save
from tests.bench.setting import end_on_sigterm, say, text_model, where

Printed = Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """One program. ``figures`` makes figures of the JSON line that it prints; None = it keeps its own."""

    name: str
    about: str
    arguments: Callable[[], Sequence[str]]
    figures: Callable[[Printed], list[Figure]] | None = None


def model_figures(printed: Printed) -> list[Figure]:
    """The model runner alone beside transformers' forward passes."""
    names = {
        "prefill_256": "runner alone: prefill of 256 tokens",
        "decode_batch_1": "runner alone: decode step, batch 1",
        "decode_batch_8": "runner alone: decode step, batch 8",
    }
    return [
        Figure(name, printed[key]["ours_ms"], "ms", printed[key]["transformers_ms"], basis="transformers")
        for key, name in names.items()
    ]


def witness_figures(printed: Printed) -> list[Figure]:
    """The witness runner alone."""
    batch, context = printed["batch"], printed["context"]
    name = f"witness runner alone, batch {batch}, context up to {context}"
    rate = printed["greedy"]["decode_tokens_per_s"]
    return [
        Figure(name, rate, "tokens/s", 100_000, at_most=False),
        Figure(name + ", temperature 1", printed["temperature_1"]["decode_tokens_per_s"], "tokens/s"),
        Figure("witness oracle, greedy", printed["oracle_greedy_tokens_per_s"], "tokens/s"),
    ]


def gateway_figures(printed: Printed) -> list[Figure]:
    """What stands between client and workers, by the witness."""
    found, goals = printed["figures"], printed["goals"]
    rows = (
        ("gateway, router and wire: added to TTFT", "ttft_added_ms", "ms", True),
        ("router process, CPU a token, 1 stream", "router_cpu_us_per_token_1_stream", "µs", True),
        ("router process, CPU a token, 32 streams", "router_cpu_us_per_token_32_streams", "µs", True),
        ("witness through all processes, 32 streams", "tokens_per_s_32_streams", "tokens/s", False),
    )
    return [Figure(name, found[key], unit, goals[key], at_most=at_most) for name, key, unit, at_most in rows]


PARTS = (
    Part("serving", "the served model beside transformers", lambda: ()),
    Part("startup", "seconds to ready, and memory", lambda: ()),
    Part("gateway", "gateway, router and wire, by the witness", lambda: (), gateway_figures),
    Part("model", "the model runner alone beside transformers", lambda: [str(text_model())], model_figures),
    Part("store", "the KV store: hits, index, restart, beside Mooncake", lambda: ()),
    Part("ttft", "a long prompt computed, found in memory, found on disk", lambda: ()),
    Part("transfer", "the handoff beside memcpy and plain NIXL", lambda: ()),
    Part("witness", "the witness runner alone", lambda: (), witness_figures),
)


def run_part(part: Part) -> int:
    """Run one part and keep what it found; returns its exit status."""
    say(f"--- {part.name}: {part.about}")
    busy = where()
    command = [sys.executable, "-m", f"tests.bench.bench_{part.name}", *part.arguments()]
    status, printed = _run(command, read=part.figures is not None)
    if status == 0 and part.figures is not None:
        data = json.loads(printed.strip().splitlines()[-1])
        save(record(part.name, busy, part.figures(data), data))
    return status


def _run(command: Sequence[str], *, read: bool) -> tuple[int, str]:
    """Exit status, and what it printed if that is to be read; interrupted, it may clean up after itself."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    output = subprocess.PIPE if read else None
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, text=True)
    try:
        printed, _ = process.communicate()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    return process.returncode, printed or ""


def write_readme() -> str:
    """The page of all results as they lie there now; returns it."""
    page = readme(load())
    README.write_text(page, encoding="utf-8")
    return page


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was started is stopped
    parser = argparse.ArgumentParser(prog="make bench", description="Measure speed and memory.")
    names = [part.name for part in PARTS]
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names)
    )
    parser.add_argument("--tables", action="store_true", help="measure nothing; write bench/README.md anew")
    args = parser.parse_args()
    end_on_sigterm()
    chosen = [] if args.tables else [part for part in PARTS if part.name in args.only]
    broken = [part.name for part in chosen if run_part(part) != 0]
    print(write_readme())
    if broken:
        say(f"failed: {', '.join(broken)}")
    return 1 if broken else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
