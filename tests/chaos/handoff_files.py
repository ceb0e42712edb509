"""Proof: no spoiled file of the disk tier is ever taken for the record that it was.

In bulk over the tier itself, and through a real kv_store that starts over a directory that was spoiled while
it was down, and is spoiled on while it serves.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from shared.tiering.record import CorruptRecord, KvRecord, decode_header, header_length, verify
from tests.chaos.cluster import Cluster
from tests.chaos.handoff_base import (
    Book,
    Proof,
    Setting,
    Verdict,
    again,
    cluster_of,
    leaks,
    long_cases,
    rest_after,
    said,
    total,
    until,
)
from tests.chaos.handoff_patched import patched
from tests.chaos.mutations import BEHIND_THE_HEADER, WAYS, Way, flip_payload, spoiled
from tests.chaos.records import Case
from tests.contract.tiering.harness import Stored, make_all
from tests.unit.tiering.disk_setting import Disk, file_of, record_files

BATCH, BLOCK_SIZE = 256, 16
#: Every prompt is looked up in the store, and loaded.
STORE_ONLY = (
    "prefill:kv.prefix_caching=false",
    "prefill:kv.num_blocks=2048",
    "decode:kv.num_blocks=2048",
    "kv_store:kv.num_blocks=2048",
    "kv_store:embeddings_mb=0",
    "kv_store:lower.deadline_s=5",
)
NUM_PROMPTS = 48
LOADING = patched(prefill="always_load")


async def prove(setting: Setting) -> list[Proof]:
    bulk, real = await asyncio.gather(asyncio.to_thread(_bulk, setting), _real_store(setting))
    return [*bulk, *real]


# In bulk.


class _Trial:
    """Records on disk, some of them spoiled, and what becomes of them. ``accepts`` judges one that the tier
    gave, by raising CorruptRecord."""

    def __init__(self, directory: Path, accepts: Callable[[Stored, bytes, memoryview], None]) -> None:
        self._directory = directory
        self._accepts = accepts
        self._records = make_all(range(BATCH))
        disk = Disk(directory, 4 * BATCH)
        disk.store(self._records)
        disk.close()
        self._files = [file_of(directory, record).read_bytes() for record in self._records]
        self.reasons: Counter[str] = Counter()
        self.spoiled = self.wrong = self.lost = self.uncounted = 0

    def round(self, ways: tuple[Way, ...], rng: random.Random) -> None:
        """Spoil a part of the records before the tier starts, a part while it serves, and load all."""
        for path in self._directory.glob("quarantine/*"):
            path.unlink()
        early = {n: spoiled(ways, *self._pair(n, rng), rng) for n in range(0, BATCH, 2)}
        for n, data in enumerate(self._files):
            file_of(self._directory, self._records[n]).write_bytes(early.get(n, data))
        disk = Disk(self._directory, 4 * BATCH)
        late = {n: spoiled(ways, *self._pair(n, rng), rng) for n in range(1, BATCH, 4)}
        for n, data in late.items():
            file_of(self._directory, self._records[n]).write_bytes(data)
        bad = early.keys() | late.keys()
        refused = self._load(disk, bad)
        disk.close()
        counted = sum(n for (event, _), n in _quarantined(disk).items() if event == "quarantined")
        self.reasons.update({reason: n for (_, reason), n in _quarantined(disk).items()})
        self.reasons.update(refused)
        self.spoiled += len(bad)
        self.uncounted += abs(len(bad) - counted - refused.total())

    def _pair(self, n: int, rng: random.Random) -> tuple[bytes, bytes]:
        return self._files[n], self._files[(n + rng.randrange(1, BATCH)) % BATCH]

    def _load(self, disk: Disk, bad: set[int]) -> Counter[str]:
        headers, into = disk.driver.load(self._records)
        refused: Counter[str] = Counter()
        for n, stored in enumerate(self._records):
            header = headers.get(stored.key)
            if header is not None:
                try:
                    self._accepts(stored, header, into[stored.key])
                except CorruptRecord as error:
                    refused[f"loaded: {error.reason}"] += 1
                    header = None
            if header is not None:
                self.wrong += bytes(into[stored.key]) != bytes(stored.item.payload)
            elif n not in bad:
                self.lost += 1
        return refused


def _quarantined(disk: Disk) -> dict[tuple[str, str], int]:
    return {event: n for event, n in disk.seen.events.items() if event[0] == "quarantined"}


def _verified(stored: Stored, header: bytes, payload: memoryview) -> None:
    wanted = stored.record
    verify(decode_header(header), payload, wanted.content, wanted.identity, wanted.layout)


def _bulk(setting: Setting) -> list[Proof]:
    rng = random.Random(f"{setting.seed}/files")
    trial = _Trial(setting.root / "bulk", _verified)
    while trial.spoiled < setting.lane.files:
        trial.round(WAYS, rng)
    passed = not (trial.wrong or trial.lost or trial.uncounted)
    figure = (
        f"{trial.spoiled} spoiled files in {len(WAYS)} ways: {trial.wrong} taken for good, "
        f"{trial.uncounted} not counted, {trial.lost} good ones lost"
    )
    figures = {"files": trial.spoiled, "wrong": trial.wrong, "reasons": dict(trial.reasons)}
    main = (trial.wrong + trial.uncounted, f"wrong or uncounted of {trial.spoiled}", 0)
    return [Proof("mutated files", passed, figure, figures, main=main), _bulk_control(setting, rng)]


def _bulk_control(setting: Setting, rng: random.Random) -> Proof:
    """The files as they are, read by nobody's rules."""
    directory, wrong = setting.root / "control", 0
    records = make_all(range(64))
    disk = Disk(directory, 1000)
    disk.store(records)
    disk.close()
    for n, stored in enumerate(records):
        path, other = file_of(directory, stored), file_of(directory, records[n - 1])
        data = spoiled(BEHIND_THE_HEADER, path.read_bytes(), other.read_bytes(), rng)
        wrong += data[header_length(data) :] != bytes(stored.item.payload)
    figure = f"{wrong} wrong payloads of {len(records)}"
    return Proof("mutated files, nothing verified", wrong == len(records), figure, control=True)


# Through a real store.


async def _real_store(setting: Setting) -> list[Proof]:
    disk = setting.root / "tier"
    cases = list(islice(long_cases(setting.seed), NUM_PROMPTS))
    settings = (*STORE_ONLY, f"kv_store:disk.path={disk}")
    async with cluster_of(setting, "filling", "p=1,d=1,s=1", settings, as_spec=LOADING) as (cluster, book):
        filled = await _fill(cluster, book, cases)
        filling = await asyncio.to_thread(Verdict.of, book)
    if not (filled and filling.good):
        return [Proof("mutated files, real kv_store", False, f"the disk was not filled; {filling}")]
    rng = random.Random(f"{setting.seed}/real")
    proof = await _over_spoiled(setting, cases, settings, disk, rng)
    return [proof, await _unverified(setting, cases, settings, disk, rng)]


async def _fill(cluster: Cluster, book: Book, cases: Sequence[Case]) -> bool:
    """Ask everything until all blocks lie on disk: each goes there at its second use."""
    wanted = sum(map(_usable, cases))

    async def is_filled() -> bool:
        await book.send([again(case, len(book.cases) + n) for n, case in enumerate(cases)])
        return await total(cluster, "kv_store", "triptych_kv_offload_bytes_total") > 0 and (
            await total(
                cluster, "kv_store", "triptych_kv_offload_seconds_count", tier="disk", direction="store"
            )
            >= wanted
        )

    filled = await until(is_filled, 30.0) is not None
    await cluster.at_rest(5.0)
    return filled


def _usable(case: Case) -> int:
    """Blocks of a prompt that are looked up."""
    return (len(case.prompt) - 1) // BLOCK_SIZE


async def _over_spoiled(
    setting: Setting, cases: Sequence[Case], settings: Sequence[str], disk: Path, rng: random.Random
) -> Proof:
    """One file of each prompt's is spoiled, so that every one of them is met; of every other prompt only
    when the store serves again."""
    chains = list(_chains(disk, cases))
    marked = [rng.choice(chain) for chain in chains]
    originals = {path: path.read_bytes() for path in record_files(disk)}
    others = list(originals.values())
    early, late = marked[::2], marked[1::2]
    for path in early:
        path.write_bytes(spoiled(WAYS, originals[path], rng.choice(others), rng))
    async with cluster_of(setting, "spoiled", "p=1,d=1,s=1", settings, as_spec=LOADING) as (cluster, book):
        for path in late:
            path.write_bytes(spoiled((flip_payload,), originals[path], b"", rng))
        counted = await _met(cluster, book, cases, len(marked))
        loaded = await total(cluster, "kv_store", "triptych_kv_offload_tiering_chunk_hits_total", tier="disk")
        seconds, rests = await rest_after(cluster, book.ended_at, setting.lane.back_s)
        restarts, errors = sum(cluster.restarts().values()), cluster.logged_errors()
        verdict = await asyncio.to_thread(Verdict.of, book)
    passed = (
        verdict.good and counted == len(marked) and loaded > 0 and not (restarts or errors or leaks(rests))
    )
    figure = (
        f"{counted:.0f} of {len(marked)} spoiled files counted, {loaded:.0f} good ones loaded; "
        f"{verdict}; {restarts} crashes{leaks(rests)}{said(errors)}"
    )
    # The store put the spoiled ones aside and wrote them anew: as they were, for who comes next.
    for path, data in originals.items():
        path.write_bytes(data)
    figures = {"spoiled": len(marked), "counted": counted, "wrong": verdict.wrong, "rest_s": seconds}
    main = (verdict.wrong, f"wrong of {verdict.requests}", 0)
    return Proof("mutated files, real kv_store", passed, figure, figures, main=main)


async def _met(cluster: Cluster, book: Book, cases: Sequence[Case], wanted: int) -> float:
    """Ask everything, and again what was answered without the store; returns the spoiled records counted."""
    for _ in range(4):
        await book.send([again(case, len(book.cases) + n) for n, case in enumerate(cases)])
        if (counted := await _counted(cluster)) >= wanted:
            break
    return counted


async def _counted(cluster: Cluster) -> float:
    """Spoiled records: put aside by the tier, or found by who asked for them."""
    found = await total(cluster, "kv_store", "triptych_kv_offload_quarantined_total")
    for reason in ("identity", "key"):
        found += await total(
            cluster, "kv_store", "triptych_kv_offload_promotion_failures_total", tier="disk", reason=reason
        )
    return found


async def _unverified(
    setting: Setting, cases: Sequence[Case], settings: Sequence[str], disk: Path, rng: random.Random
) -> Proof:
    """The same with payloads alone, and nobody looks: neither the store at records nor workers at blocks."""
    for chain in _chains(disk, cases):
        path = rng.choice(chain)
        path.write_bytes(flip_payload(path.read_bytes(), b"", rng))
    settings = (*settings, "kv.verify=false")
    async with cluster_of(setting, "blind", "p=1,d=1,s=1", settings, as_spec=LOADING) as (cluster, book):
        await book.send([again(case, n) for n, case in enumerate(cases)])
        loaded = await total(cluster, "kv_store", "triptych_kv_offload_tiering_chunk_hits_total", tier="disk")
        verdict = await asyncio.to_thread(Verdict.of, book)
    figure = f"{loaded:.0f} records loaded unseen, {verdict.wrong} violations in {verdict.requests} requests"
    return Proof("mutated files, real kv_store, nothing verified", verdict.wrong > 0, figure, control=True)


def _chains(disk: Path, cases: Sequence[Case]) -> Iterator[list[Path]]:
    """The files of each prompt, first block first. What follows are blocks of its answer."""
    usable = {case.prompt[:BLOCK_SIZE]: _usable(case) for case in cases}
    contents: dict[bytes, tuple[KvRecord, Path]] = {}
    for path in record_files(disk):
        data = path.read_bytes()
        content = decode_header(data[: header_length(data)]).content
        if isinstance(content, KvRecord):
            contents[content.block_hash] = content, path
    followers = {content.parent: content.block_hash for content, _ in contents.values()}
    for content, path in sorted(contents.values(), key=lambda found: found[1]):
        if content.parent not in contents:
            chain, at = [path], content.block_hash
            while at in followers:
                at = followers[at]
                chain.append(contents[at][1])
            yield chain[: usable[content.token_ids]]
