"""Seconds to the first token of a long prompt: computed, or found in the KV store's memory or on its disk.

python -m tests.bench.bench_ttft [--prompts 5] [--set WHO:KEY=VALUE ...] [--no-save]

A real deployment of the demo model, text over HTTP, timed at the client. Workers find nothing in their own
caches. Of each length there are several prompts and the store's memory holds one long one, so that asking
for one drives the others out: a prompt is computed, and, once the others had their turn, found on disk (page
cache dropped) and then in memory. All answers to a prompt have the same tokens, and the store's own counters
say that each hit came from where it should; anything else ends the bench.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from services.cli.deployment import Deployment
from services.cli.metrics_view import Samples, scrape
from tests.bench.bench_disk import drop_cache
from tests.bench.client import Client, Stream, median
from tests.bench.figures import Figure, record, save, table
from tests.bench.prompts import Prompt, prompts
from tests.bench.setting import BENCH_STATE, end_on_sigterm, say, served_model, six_processes, where

LONG, SHORT = 4096, 512
_BLOCK, _NUM_OUT = 16, 8
#: Blocks of the store's memory: one long prompt, one short one, and not much more.
_STORE_BLOCKS = (LONG + SHORT) // _BLOCK + 8
#: At most this part of the seconds that computing takes, by where a prompt is found and its length.
_GOALS = {("memory", LONG): 0.03, ("memory", SHORT): 0.15, ("disk", LONG): 0.06, ("disk", SHORT): 0.15}
_COUNTED = {"memory": "cpu", "disk": "disk"}
_HITS = "triptych_kv_offload_tiering_chunk_hits_total"
_DISK = BENCH_STATE / "ttft-disk"
_SETTINGS = (
    "workers:kv.prefix_caching=false",
    f"workers:scheduler.max_model_len={LONG + 2 * _NUM_OUT}",
    f"kv_store:kv.num_blocks={_STORE_BLOCKS}",
    "kv_store:kv.policy=lru",  # others keep what was used twice, here one prompt for ever
    f"kv_store:disk.path={_DISK}",
)


@dataclass
class Asked:
    """A prompt, and the tokens that every answer to it must have."""

    prompt: Prompt
    token_ids: list[int] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.token_ids)

    @property
    def num_blocks(self) -> int:
        """Blocks that can be found: the last token is always computed."""
        return (self.num_tokens - 1) // _BLOCK


class Bench:
    """One deployment, asked one prompt at a time. ``ttft_s``: by place and length."""

    def __init__(self, deployment: Deployment) -> None:
        self._client = Client(deployment.http_url, deployment.model, _NUM_OUT)
        self._http = httpx.Client(timeout=5.0, trust_env=False)
        self._store = next(s.metrics_address for s in deployment.specs if s.kind == "kv_store")
        self.ttft_s: defaultdict[tuple[str, int], list[float]] = defaultdict(list)

    def samples(self) -> Samples:
        found = scrape(self._http, self._store)
        if found is None:
            raise RuntimeError("the store does not say what it counted")
        return found

    def ask(self, asked: Asked, place: str) -> None:
        """Ask once; ``place`` is where it must be found: nowhere, memory or disk."""
        before = self.samples()
        (stream,), _ = self._client.all_at_once([asked.prompt])
        self._check(asked, stream, place, before)
        say(f"{asked.num_tokens} tokens, {place}: {stream.ttft_s * 1e3:.0f} ms")
        self.ttft_s[place, asked.num_tokens].append(stream.ttft_s)
        self._until_quiet()

    def _check(self, asked: Asked, stream: Stream, place: str, before: Samples) -> None:
        after = self.samples()
        asked.token_ids = asked.token_ids or stream.token_ids
        if stream.token_ids != asked.token_ids:
            raise RuntimeError(f"another answer: {stream.token_ids}, not {asked.token_ids}")
        for name, tier in _COUNTED.items():
            hits = after.value(_HITS, tier=tier) - before.value(_HITS, tier=tier)
            expected = asked.num_blocks if name == place else 0
            if hits < expected or (hits and not expected):
                raise RuntimeError(
                    f"{hits:.0f} blocks of {name}, of {asked.num_blocks} to be found in {place}"
                )

    def _until_quiet(self, pause_s: float = 0.5) -> None:
        """Until the store has taken and written what it was offered: its counters stand still."""
        last = ""
        while True:
            samples = self.samples()
            names = ("triptych_kv_store_accepted_total", "triptych_kv_offload_bytes_total")
            now = str([samples.total(name) for name in names])
            if now == last:
                return
            last = now
            time.sleep(pause_s)

    def close(self) -> None:
        self._http.close()


def measure(bench: Bench, pairs: Sequence[Sequence[Asked]]) -> None:
    """Everything in turns, so that a busy machine slows all of it: a pair is computed and found in memory,
    the pair before it, driven out by then, is found on disk and again in memory."""
    for turn, pair in enumerate(pairs):
        say(f"prompts {turn + 1} of {len(pairs)}")
        for asked in pair:
            bench.ask(asked, "nowhere")
            bench.ask(asked, "memory")  # a second use: now it is written
        for asked in pairs[turn - 1] if turn else ():
            drop_cache(_DISK)
            bench.ask(asked, "disk")
            bench.ask(asked, "memory")


def figures(ttft_s: Mapping[tuple[str, int], list[float]]) -> list[Figure]:
    found = []
    for length in (LONG, SHORT):
        computed = median(ttft_s["nowhere", length])
        found.append(Figure(f"TTFT, {length} tokens in, computed", computed * 1e3, "ms"))
        for place in _COUNTED:
            ratio = median(ttft_s[place, length]) / computed
            name = f"TTFT, {length} tokens in, found " + ("on disk" if place == "disk" else "in memory")
            found.append(Figure(name, ratio, "x", _GOALS[place, length], basis="computed = 1"))
    return found


@contextmanager
def deployment(settings: Sequence[str]) -> Iterator[Deployment]:
    shutil.rmtree(_DISK, ignore_errors=True)
    try:
        with six_processes((*_SETTINGS, *settings), "e=0,p=1,d=1,s=1") as started:
            yield started
    finally:
        shutil.rmtree(_DISK, ignore_errors=True)


def supply(model_dir: Path, count: int) -> list[tuple[Asked, Asked]]:
    """Pairs of a long prompt and a short one, which fill the store's memory; none begins as another does."""
    long = list(islice(prompts(model_dir, LONG), count))
    begun = {tuple(prompt.token_ids[:_BLOCK]) for prompt in long}
    others = (p for p in prompts(model_dir, SHORT) if tuple(p.token_ids[:_BLOCK]) not in begun)
    return [(Asked(one), Asked(other)) for one, other in zip(long, others, strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description="TTFT of a prompt that is computed, or found.")
    parser.add_argument("--prompts", type=int, default=5, help="of each length, 2 or more")
    parser.add_argument("--set", action="append", default=[], metavar="[WHO:]KEY=VALUE")
    parser.add_argument("--no-save", action="store_true", help="leave the last kept result as it is")
    args = parser.parse_args()
    end_on_sigterm()
    busy, pairs = where(), supply(served_model(), args.prompts)
    with deployment(args.set) as started:
        bench = Bench(started)
        measure(bench, pairs)
        bench.close()
    found = figures(bench.ttft_s)
    details: dict[str, Any] = {
        f"{place}, {length}": [round(seconds * 1e3) for seconds in taken]
        for (place, length), taken in bench.ttft_s.items()
    }
    if not args.no_save:
        save(record("ttft", busy, found, details))
    print(table(found))
    print(details, file=sys.stderr)


if __name__ == "__main__":
    main()
