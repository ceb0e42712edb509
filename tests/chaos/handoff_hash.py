"""Proof: blocks that share a hash are never taken for each other. All workers cut their hashes to 8 bits."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from msgspec import structs

from tests.chaos.cluster import Cluster
from tests.chaos.handoff_base import Proof, Setting, Verdict, again, cluster_of, leaks, said, total
from tests.chaos.handoff_files import LOADING, STORE_ONLY
from tests.chaos.handoff_patched import patched
from tests.chaos.records import Case
from tests.chaos.workload import Workload, plain_case

BITS, BLOCK_SIZE = 8, 16
COLLISIONS = "triptych_kv_hash_collisions_total"
WANTED = 1000
WEAK = f"workers:kv.hash_bits={BITS}"
#: Prefixes are looked up wherever they may lie: in the worker, in the store's memory, on its disk.
STORED = (
    "kv_store:kv.num_blocks=128",
    "kv_store:embeddings_mb=0",
)
NUM_CASES, NUM_TWINS, NUM_PASSES = 150, 90, 3


async def prove(setting: Setting) -> list[Proof]:
    settings = (
        WEAK,
        *STORED,
        f"kv_store:disk.path={setting.root / 'tier'}",
        "prefill-1:kv.prefix_caching=false",
    )
    workload = Workload(setting.seed, scale=0.5)
    cases = [workload.case(number) for number in range(NUM_CASES)]
    cases += [again(case, NUM_CASES + number) for number, case in enumerate(_twins(setting.seed))]
    async with cluster_of(setting, "weak", "e=1,p=2,d=2,s=1", settings, as_spec=LOADING) as (cluster, book):
        await book.send(cases, per_second=50)
        collisions = await _collisions(cluster)
        refused = await total(cluster, "kv_store", "triptych_kv_offload_promotion_failures_total")
        rests = await cluster.at_rest(setting.lane.back_s)
        errors = cluster.logged_errors()
        verdict = await asyncio.to_thread(Verdict.of, book)
    passed = verdict.good and collisions > WANTED and not (errors or leaks(rests))
    figure = f"{collisions:.0f} collisions in workers, {verdict}{leaks(rests)}{said(errors)}"
    figures = {"collisions": collisions, "records_refused": refused, "wrong": verdict.wrong}
    main = (verdict.wrong, f"wrong after {collisions:.0f} collisions", 0)
    weak = Proof(f"hash cut to {BITS} bits", passed, figure, figures, main=main)
    return [weak, await _through_the_store(setting), await _control(setting, cases)]


async def _through_the_store(setting: Setting) -> Proof:
    """Twins alone, asked again and again of a worker that keeps nothing itself: what their hashes share is
    shared in the store's memory and on its disk."""
    settings = (WEAK, *STORE_ONLY, f"kv_store:disk.path={setting.root / 'twins'}")
    twins = _twins(setting.seed)
    async with cluster_of(setting, "store", "p=1,d=1,s=1", settings, as_spec=LOADING) as (cluster, book):
        for _ in range(NUM_PASSES):
            await book.send([again(case, len(book.cases) + n) for n, case in enumerate(twins)])
            rests = await cluster.at_rest(setting.lane.back_s)
        loaded = await total(cluster, "kv_store", "triptych_kv_store_hits_total")
        errors = cluster.logged_errors()
        verdict = await asyncio.to_thread(Verdict.of, book)
    figure = f"{loaded:.0f} blocks from the store, {verdict}{leaks(rests)}{said(errors)}"
    name = f"hash cut to {BITS} bits, equal blocks after different ones, by way of the store"
    main = (verdict.wrong, f"wrong of {verdict.requests}", 0)
    passed = verdict.good and loaded > 0 and not (errors or leaks(rests))
    return Proof(name, passed, figure, {"loaded": loaded}, main=main)


async def _control(setting: Setting, cases: Sequence[Case]) -> Proof:
    """The same, and equal hashes are believed."""
    believing = patched(prefill="trust_hashes", decode="trust_hashes")
    async with cluster_of(setting, "believing", "p=1,d=1", (WEAK,), as_spec=believing) as (_, book):
        plain = [case for case in cases if not case.media][:40]
        await book.send([again(case, number) for number, case in enumerate(plain)], per_second=50)
        verdict = await asyncio.to_thread(Verdict.of, book)
    figure = f"{verdict.wrong} violations in {verdict.requests} requests"
    return Proof(f"hash cut to {BITS} bits and believed", verdict.wrong > 0, figure, control=True)


async def _collisions(cluster: Cluster) -> float:
    return await total(cluster, "prefill", COLLISIONS) + await total(cluster, "decode", COLLISIONS)


def _twins(seed: int) -> list[Case]:
    """Prompts that differ in their first block alone: what comes after it has the same tokens, and, where the
    first blocks' hashes collide, the same parent."""
    rng = random.Random(f"{seed}/twins")
    tail = "".join(rng.choices("abcdefgh ", k=4 * BLOCK_SIZE + 3))
    found = []
    for number in range(NUM_TWINS):
        words = f"{number:015d}|{tail}"
        case = plain_case(seed, number, max_tokens=8)
        found.append(structs.replace(case, body=case.body | {"prompt": words}, prompt=tuple(words.encode())))
    return found
