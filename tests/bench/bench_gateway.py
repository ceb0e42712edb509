"""What gateway, router and wire cost, with the witness model behind them. Prints one JSON line.

    PYTHONPATH=.:proto python -m tests.bench.bench_gateway [--seconds 6] [--out bench/results/gateway.json]

Router, one prefill and two decode processes; the client is lean and counts, it does not read. CPU is that
of the router's process, from the kernel. The witness computes next to nothing, so the time to the first
token is nearly all ours; what a prefill step took is subtracted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from services.cli import procfs
from services.cli.topology import Topology
from tests.chaos.cluster import Cluster, running
from tests.chaos.http_client import begin_call, request_bytes
from tests.chaos.ledger import percentile
from tests.provenance import where_and_when

GOALS = {
    "ttft_added_ms": 5.0,
    "router_cpu_us_per_token_1_stream": 450.0,
    "router_cpu_us_per_token_32_streams": 60.0,
    "tokens_per_s_32_streams": 5000.0,
}
TOKENS_A_REQUEST = 400
PROMPT_TOKENS = 64
OVERRIDES = ("scheduler.max_model_len=1024", "telemetry.log_level=warning")


class Phase(Struct):
    """What one number of streams gave. Times in seconds; ``cpu``: of each process, by name."""

    streams: int
    seconds: float
    tokens: int
    ttfts: list[float]
    cpu: dict[str, float]

    def cpu_us_per_token(self, process: str) -> float:
        return self.cpu[process] / self.tokens * 1e6


async def measure(seconds: float) -> dict[str, Any]:
    """Start the processes, measure, stop them. Each phase takes about ``seconds``."""
    topology = Topology(encoders=0, prefills=1, decodes=2, kv_stores=0)
    with tempfile.TemporaryDirectory() as folder:
        async with running(Path(folder), topology, OVERRIDES) as cluster:
            await _phase(cluster, 8, 1.0)  # connections, caches and code paths are warm from here on
            one = await _phase(cluster, 1, seconds)
            many = await _phase(cluster, 32, seconds)
            ttfts = await _first_tokens(cluster, 100)
            step_s = await _mean_step_s(cluster)
    ttft_ms = percentile(ttfts, 0.5) * 1e3
    return {
        "ttft_ms": round(ttft_ms, 2),
        "ttft_p99_ms": round(percentile(ttfts, 0.99) * 1e3, 2),
        "ttft_added_ms": round(ttft_ms - step_s * 1e3, 2),
        "ttft_32_streams_p50_ms": round(percentile(many.ttfts, 0.5) * 1e3, 1),
        "router_cpu_us_per_token_1_stream": round(one.cpu_us_per_token("router"), 1),
        "router_cpu_us_per_token_32_streams": round(many.cpu_us_per_token("router"), 1),
        "tokens_per_s_1_stream": round(one.tokens / one.seconds),
        "tokens_per_s_32_streams": round(many.tokens / many.seconds),
        "cpu_us_per_token_32_streams": {name: round(many.cpu_us_per_token(name), 1) for name in many.cpu},
    }


async def _phase(cluster: Cluster, streams: int, seconds: float) -> Phase:
    """So many streams at a time, each one request after the other until the time is over."""
    pids = {row.name: row.pid for row in cluster.supervisor.rows()} | {"client": os.getpid()}
    before = {name: procfs.cpu_seconds(pid) for name, pid in pids.items()}
    began = time.perf_counter()
    ttfts: list[float] = []
    counts = await asyncio.gather(*(_stream(cluster, i, began + seconds, ttfts) for i in range(streams)))
    elapsed = time.perf_counter() - began
    cpu = {name: procfs.cpu_seconds(pid) - before[name] for name, pid in pids.items()}
    return Phase(streams, elapsed, sum(counts), ttfts, cpu)


async def _stream(cluster: Cluster, stream: int, until: float, ttfts: list[float]) -> int:
    count = number = 0
    while time.perf_counter() < until:
        ttfts.append(await _ask(cluster, f"{stream}/{number}/{until}", TOKENS_A_REQUEST))
        count += TOKENS_A_REQUEST
        number += 1
    return count


async def _first_tokens(cluster: Cluster, count: int) -> list[float]:
    return [await _ask(cluster, f"first/{i}/{time.monotonic()}", 2) for i in range(count)]


async def _ask(cluster: Cluster, name: str, max_tokens: int) -> float:
    """One streamed answer of exactly ``max_tokens``; returns the seconds to its first token. Raises
    RuntimeError when it is not whole."""
    prompt = f"{name} {'gateway ' * PROMPT_TOKENS}"[:PROMPT_TOKENS]
    body = {"model": "witness", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0}
    body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    times: list[float] = []
    tail = b""

    def on_body(data: bytes) -> None:
        nonlocal tail
        if not times:
            times.append(time.perf_counter())
        tail = data if len(data) > 400 else (tail + data)[-800:]

    began = time.perf_counter()
    call = await begin_call(
        cluster.http, request_bytes("POST", "/v1/completions", msgspec.json.encode(body)), on_body
    )
    await call.finished
    if call.status != 200 or b'"completion_tokens":%d,' % max_tokens not in tail:
        raise RuntimeError(f"not the whole answer (status {call.status})")
    return times[0] - began


async def _mean_step_s(cluster: Cluster) -> float:
    (prefill,) = cluster.of_kind("prefill")
    samples = await cluster.metrics(prefill)
    steps = samples.value("triptych_step_seconds_count")
    return samples.value("triptych_step_seconds_sum") / steps if steps else 0.0


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was started is stopped
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "bench/results/gateway.json")
    args = parser.parse_args()
    figures = asyncio.run(measure(args.seconds))
    record = {"bench": "gateway", **where_and_when(), "load_average": os.getloadavg(), "goals": GOALS}
    record["figures"] = figures
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
