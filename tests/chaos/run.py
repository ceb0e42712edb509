"""`make chaos`: kills and freezes under load, every stream compared with its oracle, then the controls.

    python -m tests.chaos.run [--seed N] [--requests N] [--kills N] [--set KEY=VALUE] [--no-controls]

Prints a table and one line; exits 1 on any violation. Logs and the whole ledger stay under .triptych/chaos.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path

import msgspec

from shared.clock import SystemEntropy
from tests.chaos import report
from tests.chaos.controls import Control, run_controls
from tests.chaos.scenario import Outcome, Plan, run_plan


async def _run(plan: Plan, root: Path, overrides: list[str], controls: bool) -> tuple[Outcome, list[Control]]:
    outcome = await run_plan(plan, root / "main", overrides)
    return outcome, await run_controls(plan.seed, root) if controls else []


def main(argv: list[str] | None = None) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was started is stopped
    plain = Plan(0)
    parser = argparse.ArgumentParser(prog="make chaos ARGS=...")
    parser.add_argument("--seed", type=int, help="default: a new one")
    parser.add_argument("--requests", type=int, default=plain.num_requests)
    parser.add_argument("--kills", type=int, default=plain.kills, help="of each worker kind")
    parser.add_argument("--freezes", type=int, default=plain.freezes, help="of prefill and decode each")
    parser.add_argument(
        "--set", action="append", default=[], metavar="[WHO:]KEY=VALUE", help="as `up` has it"
    )
    parser.add_argument("--no-controls", action="store_true")
    parser.add_argument("--state-dir", type=Path, default=report.ROOT / ".triptych" / "chaos")
    args = parser.parse_args(argv)
    seed = SystemEntropy().seed() % 1_000_000 if args.seed is None else args.seed
    plan = Plan(seed, num_requests=args.requests, kills=args.kills, freezes=args.freezes)
    outcome, controls = asyncio.run(_run(plan, args.state_dir, args.set, not args.no_controls))
    ledger = {"seen": outcome.seen, "faults": outcome.faults, "violations": outcome.violations}
    (args.state_dir / "ledger.json").write_bytes(msgspec.json.encode(ledger))
    print(report.show(outcome, controls))
    report.save(outcome, controls, report.RESULTS / "chaos.json")
    return 0 if report.passed(outcome, controls) else 1


if __name__ == "__main__":
    sys.exit(main())
