"""What eviction policies make of a trace of conversations and of prompts seen once; the default follows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from shared.clock import ManualClock
from shared.kv_cache.block_hash import BlockHasher
from shared.tiering.base import Filled
from shared.tiering.cpu import CpuTier
from shared.transfer.arena import Arena
from shared.types.store import BlockKey
from tests.bench.store_setting import IDENTITY, chain, tokens_of


def conversations(seed: int, scans: float, count: int = 1500) -> Iterator[list[BlockKey]]:
    """Prompts of conversations that grow from shared beginnings; a share of all is long and seen once."""
    rng, hasher = random.Random(seed), BlockHasher(IDENTITY, 16)
    systems = [tokens_of(rng, 20) for _ in range(10)]
    talks: list[list[int]] = []
    for _ in range(count):
        if rng.random() < scans:
            prompt = tokens_of(rng, rng.randrange(40, 120))
        elif talks and rng.random() < 0.75:
            prompt = talks[max(0, len(talks) - 1 - int(rng.expovariate(1 / 8)))]
            prompt += tokens_of(rng, rng.randrange(1, 8))
            if len(prompt) > 16 * 110:
                talks.remove(prompt)
        else:
            prompt = rng.choice(systems) + tokens_of(rng, rng.randrange(2, 10))
            talks.append(prompt)
        yield chain(hasher, prompt)


def hit_ratio(policy: str, prompts: list[list[BlockKey]], num_blocks: int) -> float:
    """Share of all blocks that were found; what was not comes in offers of eight blocks."""
    with Arena.create("kv", (num_blocks,), (64,), "a" * 32) as arena:
        tier = CpuTier(arena, 0, ManualClock(), policy=policy)
        num_found = 0
        for keys in prompts:
            found = tier.lookup(keys)
            tier.pin(found)
            tier.use(keys[: len(found)])
            num_found += len(found)
            for first in range(len(found), len(keys), 8):
                part = keys[first : first + 8]
                tier.commit([Filled(i, k, (1,)) for i, k in zip(tier.reserve(len(part)), part, strict=False)])
            tier.unpin(found)
    return num_found / sum(map(len, prompts))


def policy_details() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for scans in (0.0, 0.3, 0.6):
        prompts = list(conversations(1, scans))
        for num_blocks in (500, 1500):
            ratios = {p: round(hit_ratio(p, prompts, num_blocks), 3) for p in ("lru", "arc", "s3fifo")}
            found[f"hit ratio, {num_blocks} blocks, {scans:.0%} seen once"] = ratios
    return found
