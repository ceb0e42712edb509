"""`make chaos-handoff`: the proofs that no wrong byte is served, whatever happens to files, links and peers.

    python -m tests.chaos.handoff [--long] [--seed N] [--only NAME ...] [--jobs N]

Each part runs in a process of its own, so that no part's end is another's. Prints one line a proof: name,
seed, figure, PASS or FAIL; exits 1 on any FAIL. Figures go to bench/results, logs stay under .triptych.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from shared.clock import SystemEntropy
from tests.bench import figures
from tests.bench.setting import where
from tests.chaos import (
    handoff_cost,
    handoff_disk,
    handoff_files,
    handoff_frames,
    handoff_freeze,
    handoff_hash,
    handoff_kills,
    handoff_links,
    report,
)
from tests.chaos.handoff_base import FAST, LONG, Lane, Proof, Setting


class Part(Struct, frozen=True):
    """Proofs that are made together. ``alone``: what they measure bears no neighbour."""

    prove: Callable[[Setting], Awaitable[list[Proof]]]
    alone: bool = False


#: In the order of their start, the longest first.
PARTS = {
    "kills": Part(handoff_kills.prove),
    "restarts": Part(handoff_links.prove_restarts),
    "partitions": Part(handoff_links.prove_partitions),
    "files": Part(handoff_files.prove),
    "disk": Part(handoff_disk.prove),
    "frames": Part(handoff_frames.prove),
    "hash": Part(handoff_hash.prove),
    "freeze": Part(handoff_freeze.prove),
    "cost": Part(handoff_cost.prove, alone=True),
}


async def _run_all(names: list[str], lane: Lane, seed: int, root: Path, jobs: int) -> list[Proof]:
    proofs: list[Proof] = []
    slots = asyncio.Semaphore(jobs)

    async def run(name: str) -> None:
        async with slots:
            found = await _run_part(name, lane, seed, root)
        for proof in found:
            print(line_of(proof, seed), flush=True)
        proofs.extend(found)

    async with asyncio.TaskGroup() as group:
        for name in names:
            if not PARTS[name].alone:
                group.create_task(run(name))
    for name in names:
        if PARTS[name].alone:
            await run(name)
    return proofs


async def _run_part(name: str, lane: Lane, seed: int, root: Path) -> list[Proof]:
    """In a process of its own; one that ends without an answer, or too late, has failed."""
    folder = root / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    out = folder / "proofs.json"
    argv = [sys.executable, "-m", "tests.chaos.handoff", "--part", name, "--seed", str(seed)]
    argv += ["--state-dir", str(root), *(["--long"] if lane is LONG else [])]
    environ = dict(os.environ)
    if name == "disk":
        argv, environ = handoff_disk.in_small_disk(argv, folder / "mount")
    with (folder / "output.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *argv, stdout=log, stderr=log, env=environ, cwd=report.ROOT
        )
        problem = ""
        try:
            async with asyncio.timeout(lane.timeout_s):
                await process.wait()
        except TimeoutError:
            problem = f"not over after {lane.timeout_s:.0f} s"
        finally:
            if process.returncode is None:
                await _end(process)
    if not problem and out.exists():
        return msgspec.json.decode(out.read_bytes(), type=list[Proof])
    lines = (folder / "output.log").read_text(encoding="utf-8", errors="replace").split("\n")
    said = " / ".join(line for line in lines[-6:] if line.strip())
    return [Proof(name, False, f"{problem or 'it broke'}: {said}")]


async def _end(process: asyncio.subprocess.Process) -> None:
    """It stops what it started first."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(20.0):
            await process.wait()
            return
    process.kill()
    await process.wait()


def line_of(proof: Proof, seed: int) -> str:
    """One proof as it is shown."""
    passed = "PASS" if proof.passed else "FAIL"
    if proof.control:
        passed += " (it fails, as it must)" if proof.passed else " (a control that must fail did not)"
    return f"{proof.name}  seed {seed}  {proof.figure}  {passed}"


def _save(proofs: list[Proof], lane: Lane, seed: int, seconds: float) -> None:
    """Beside the results of measurements, and in the page of their tables."""
    rows = [figures.Figure(p.name, *p.main, basis=_basis(p)) for p in proofs if p.main is not None]
    details = {
        "lane": msgspec.to_builtins(lane),
        "seed": seed,
        "passed": all(proof.passed for proof in proofs),
        "seconds": round(seconds, 1),
        "proofs": msgspec.to_builtins(proofs),
    }
    name = "chaos_handoff" if lane is FAST else "chaos_handoff_long"
    figures.save(figures.record(name, where(), rows, details))
    figures.README.write_text(figures.readme(figures.load()), encoding="utf-8")


def _basis(proof: Proof) -> str:
    return "" if proof.passed else "FAILED"


def main(argv: list[str] | None = None) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was started is stopped
    parser = argparse.ArgumentParser(prog="make chaos-handoff ARGS=...")
    parser.add_argument("--long", action="store_true", help="production leases, and more of everything")
    parser.add_argument("--seed", type=int, help="default: a new one")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--jobs", type=int, default=2, help="parts at a time")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--state-dir", type=Path, default=report.ROOT / ".triptych" / "chaos-handoff")
    args = parser.parse_args(argv)
    lane = LONG if args.long else FAST
    seed = SystemEntropy().seed() % 1_000_000 if args.seed is None else args.seed
    if args.part:
        setting = Setting(lane, seed, args.state_dir / args.part)
        proofs = asyncio.run(_prove(PARTS[args.part], setting))
        (setting.root / "proofs.json").write_bytes(msgspec.json.encode(proofs))
        return 0
    began = time.monotonic()
    proofs = asyncio.run(_run_all(args.only, lane, seed, args.state_dir, args.jobs))
    seconds = time.monotonic() - began
    if len(args.only) == len(PARTS):
        _save(proofs, lane, seed, seconds)
    good = sum(proof.passed for proof in proofs)
    print(f"chaos-handoff {lane.name} {seed} {good} of {len(proofs)} proofs in {seconds:.0f} s", end=" ")
    print("PASS" if good == len(proofs) else "FAIL")
    return 0 if good == len(proofs) else 1


async def _prove(part: Part, setting: Setting) -> list[Proof]:
    return await part.prove(setting)


if __name__ == "__main__":
    sys.exit(main())
