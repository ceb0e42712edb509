"""The KV store: a hit beside memcpy of the same blocks, its index, its RPCs, a start over a full directory.

python -m tests.bench.bench_store [--rounds 15] [--records 10000]

Rates of the index are per second of CPU time, so that a busy machine does not change them. What eviction
policies make of a trace is shown for the choice of the default.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from shared.clock import ManualClock, MonotonicClock, SystemEntropy
from shared.failpoints import Failpoints
from shared.kv_cache.block_hash import BlockHasher
from shared.tiering.base import Filled
from shared.tiering.cpu import CpuTier
from shared.tiering.kv_store import KvStore, Limits
from shared.tiering.pulls import Pulls
from shared.transfer.arena import Arena
from shared.types.store import OfferedBlock, StoreHit
from tests.bench.bench_store_mooncake import mooncake_figures
from tests.bench.figures import Figure, record, save, table
from tests.bench.setting import end_on_sigterm, say, where
from tests.bench.store_policies import policy_details
from tests.bench.store_process import restart_figures, rpc_figures
from tests.bench.store_setting import IDENTITY, LARGE, PREFIX, Side, chain, commit, tokens_of
from tests.fakes.tiers import below

# --- a hit beside memcpy --------------------------------------------------------------------------


class HitPath:
    """A worker, a store and a reader in one process: the store holds what the worker offered."""

    def __init__(self, num_blocks: int) -> None:
        self._sides = [Side(name, num_blocks, LARGE) for name in ("worker", "store", "reader")]
        worker, store, self._reader = self._sides
        self._pulls = Pulls("kv", lambda outcome: None)
        self._pulls.bind(store.puller)
        self._store = KvStore(
            IDENTITY,
            LARGE,
            store.arena,
            store.info,
            self._pulls,
            below(ManualClock())[0],
            MonotonicClock(),
            SystemEntropy(),
            Failpoints(),
            Limits("arc", 1.0, 30.0),
        )
        rng = random.Random(num_blocks)
        self.keys = chain(BlockHasher(IDENTITY, 16), tokens_of(rng, num_blocks))
        places = rng.sample(range(num_blocks), num_blocks)
        offered = [OfferedBlock(key, worker.fill(at)) for key, at in zip(self.keys, places, strict=True)]
        kept: list[int] = []
        self._store.offer(worker.info(), offered, kept.append)
        self._pulls.on_outcome(store.outcomes.get(timeout=60))
        if kept != [num_blocks]:
            raise RuntimeError("the store did not keep what it was offered")
        self._local = rng.sample(range(num_blocks), num_blocks)
        self._memcpy = self._moves()

    def _moves(self) -> list[tuple[int, int, int]]:
        _, store, reader = self._sides
        found: list[StoreHit] = []
        self._store.lookup(LARGE, self.keys, found.append)
        self._store.release([found[0].lease_id])
        extent = store.arena.info.extent_bytes[0]

        def address(side: Side, block_id: int) -> int:
            return int(np.frombuffer(side.arena.block(0, block_id), np.uint8).ctypes.data)

        pairs = zip(found[0].runs[0].blocks, self._local, strict=True)
        return [(address(reader, at), address(store, ref.block_id), extent) for ref, at in pairs]

    def memcpy(self) -> None:
        for target, source, nbytes in self._memcpy:
            ctypes.memmove(target, source, nbytes)

    def hit(self) -> None:
        """Look up, pull, verify, commit, and give the lease back."""
        found: list[StoreHit] = []
        self._store.lookup(LARGE, self.keys, found.append)
        (hit,) = found
        if hit.num_blocks != len(self.keys):
            raise RuntimeError(f"a hit of {hit.num_blocks} blocks")
        self._reader.pull(hit.runs[0], self._local)
        commit(self.keys, hit.runs[0].blocks)
        self._store.release([hit.lease_id])

    def close(self) -> None:
        for side in self._sides:
            side.close()


def hit_figures(rounds: int) -> tuple[list[Figure], dict[str, Any]]:
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    for num_blocks in (64, 512):
        path = HitPath(num_blocks)
        path.hit(), path.memcpy()
        taken: dict[str, list[float]] = {"hit": [], "memcpy": []}
        for turn in range(rounds):
            for name in ("hit", "memcpy") if turn % 2 else ("memcpy", "hit"):
                began = time.perf_counter()
                getattr(path, name)()
                taken[name].append(time.perf_counter() - began)
        path.close()
        ours, theirs = (statistics.median(taken[name]) for name in ("hit", "memcpy"))
        title = f"CPU tier: hit of {num_blocks} blocks (look up, pull, verify, commit)"
        figures.append(Figure(title, theirs / ours, "x", 0.5, at_most=False, basis="memcpy = 1"))
        details[title] = {"hit_ms": round(ours * 1e3, 2), "memcpy_ms": round(theirs * 1e3, 2)}
    return figures, details


# --- the index ------------------------------------------------------------------------------------


def per_second(call: Callable[[], object], count: int = 2000) -> float:
    """Calls a second of CPU time, the best of ten tries: neighbours on the same core only take away."""
    best = 0.0
    for _ in range(10):
        began = time.process_time()
        for _ in range(count):
            call()
        best = max(best, count / (time.process_time() - began))
    return best


def index_figures() -> list[Figure]:
    rng = random.Random(0)
    hasher = BlockHasher(IDENTITY, 16)
    with Arena.create("kv", (16_384,), (64,), "a" * 32) as arena:
        tier = CpuTier(arena, 0, MonotonicClock())
        prompts = [tokens_of(rng, PREFIX) for _ in range(200)]
        for prompt in prompts:
            keys = chain(hasher, prompt)
            ids = tier.reserve(len(keys))
            tier.commit([Filled(i, key, (1,)) for i, key in zip(ids, keys, strict=True)])
        # As a request brings them: equal, and objects of their own.
        wanted = [[int(str(token)) for token in prompt] for prompt in prompts]
        ready = [hasher.contents(prompt) for prompt in wanted]
        keys_of = [chain(hasher, prompt) for prompt in wanted]
        at = iter(range(1 << 30))

        def by_hash() -> int:
            return len(tier.longest(*ready[next(at) % 200]))

        def hashing() -> int:
            return len(tier.longest(*hasher.contents(wanted[next(at) % 200])))

        def by_key() -> int:
            return len(tier.lookup(keys_of[next(at) % 200]))

        if {by_hash(), hashing(), by_key()} != {PREFIX}:
            raise RuntimeError("the index does not find what it holds")
        gc.collect()
        gc.freeze()
        title = f"index in process, {PREFIX}-block prefixes:"
        return [
            Figure(f"{title} hashes ready", per_second(by_hash), "look-ups/s", 50_000, at_most=False),
            Figure(
                f"{title} hashing included", per_second(hashing, 500), "look-ups/s", 10_000, at_most=False
            ),
            Figure(f"{title} as they come from the wire", per_second(by_key, 500), "look-ups/s"),
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Figures of the KV store.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--records", type=int, default=10_000)
    args = parser.parse_args()
    end_on_sigterm()
    busy = where()
    say("index")
    figures = index_figures()
    say("hits beside memcpy")
    found, details = hit_figures(args.rounds)
    figures += found
    say("beside Mooncake")
    found, more = mooncake_figures(args.rounds)
    figures += found
    details |= more
    say("RPCs")
    figures += asyncio.run(rpc_figures())
    say("restart")
    figures += asyncio.run(restart_figures(args.records))
    say("policies")
    details |= policy_details()
    save(record("store", busy, figures, details))
    print(table(figures), flush=True)
    for title, values in details.items():
        print(f"{title}: {values}", flush=True)


if __name__ == "__main__":
    main()
