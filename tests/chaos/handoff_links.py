"""Proofs: partitions between prefill and decode, and peers that start anew at the same host and port."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import msgspec
from msgspec import Struct

from services.cli import procfs
from services.cli.topology import HOST
from shared.clock import SystemEntropy
from shared.types.transfer import AgentInfo, BlockRef
from tests.chaos.cluster import Cluster
from tests.chaos.handoff_base import (
    CLOCK,
    Book,
    Proof,
    Setting,
    Verdict,
    cluster_of,
    leaks,
    plain_cases,
    rest_after,
    said,
    total,
    until,
)
from tests.chaos.ledger import percentile
from tests.chaos.proxy import BOTH, Proxy, Way
from tests.chaos.records import Case
from tests.contract.transfer.harness import ROOT, Reader
from tests.contract.transfer.peer import MARK, content

#: After the end of a partition, or once a restarted peer is ready, the first good transfer comes so soon.
GOOD_S = 5.0
#: No answer takes longer, whatever happens to the link.
HANG_S = 15.0
FLAP_S = 0.3
NUM_REQUESTS = 12
PEER_RESTARTS = 50


@contextmanager
def through_proxy(name: str) -> Iterator[tuple[Proxy, list[str]]]:
    """A proxy in front of this process's transfers, and the settings that make all use it."""
    port = next(procfs.internal_ports(HOST, SystemEntropy()))
    proxy = Proxy((HOST, port))
    settings = [
        "transfer.order=tcp",
        f"{name}:transfer.tcp_port={port}",
        f"{name}:transfer.tcp_advertise={HOST}:{proxy.port}",
    ]
    try:
        yield proxy, settings
    finally:
        proxy.close()


class Link:
    """A prefill and a decode worker that read over tcp, and a supply of requests."""

    def __init__(self, setting: Setting, cluster: Cluster, book: Book) -> None:
        self.setting = setting
        self.cluster = cluster
        self.book = book
        self._cases = plain_cases(setting.seed)

    def take(self, count: int) -> list[Case]:
        return list(islice(self._cases, count))

    async def moved(self) -> float:
        """Bytes of KV that decode has pulled over the wire in this life."""
        return await total(self.cluster, "decode", "triptych_transfer_bytes_total", backend="tcp", kind="kv")

    async def first_good(self, patience_s: float) -> float | None:
        """Seconds until a transfer is good, asking all the while."""
        before = await self.moved()

        async def has_moved() -> bool:
            await self.book.send(self.take(2))
            return await self.moved() > before

        return await until(has_moved, patience_s)


# Partitions.


class _Partition(Struct):
    """One of them. ``ways``: those that are shut; flapping: shut and open in turns."""

    name: str
    ways: frozenset[Way]
    flapping: bool = False


PARTITIONS = (
    _Partition("decode to prefill", frozenset({Way.THERE})),
    _Partition("prefill to decode", frozenset({Way.BACK})),
    _Partition("both ways", BOTH),
    _Partition("flapping", BOTH, flapping=True),
)


async def prove_partitions(setting: Setting) -> list[Proof]:
    proofs = []
    with through_proxy("prefill-0") as (proxy, settings):
        async with cluster_of(setting, "partitions", "p=1,d=1", settings) as (cluster, book):
            link = Link(setting, cluster, book)
            await book.send(link.take(NUM_REQUESTS))
            for partition in PARTITIONS:
                proofs.append(await _partition(link, proxy, partition))
            errors, restarts = cluster.logged_errors(), sum(cluster.restarts().values())
            verdict = await asyncio.to_thread(Verdict.of, book)
    passed = verdict.good and book.longest_s <= HANG_S and not (errors or restarts)
    figure = f"{verdict}; longest answer {book.longest_s:.1f} s; {restarts} restarts"
    figure += said(errors)
    main = (book.longest_s, "s for the longest answer", HANG_S)
    return [*proofs, Proof("answers in and after partitions", passed, figure, main=main)]


async def _partition(link: Link, proxy: Proxy, partition: _Partition) -> Proof:
    """Requests are under way when the link goes; more come once what those held is free; then it heals."""
    lane = link.setting.lane
    kept = sum(proxy.kept(way) for way in BOTH)
    under_way = asyncio.create_task(link.book.send(link.take(NUM_REQUESTS)))
    await asyncio.sleep(0.1)
    began = CLOCK.now()
    proxy.shut(*partition.ways)
    flapping = asyncio.create_task(_flap(proxy, partition)) if partition.flapping else None
    await under_way
    back_s, rests = await rest_after(link.cluster, began, lane.back_s + 1.0)
    while CLOCK.now() < began + lane.partition_s:
        await link.book.send(link.take(4), per_second=10)
        await asyncio.sleep(0.1)
    if flapping is not None:
        flapping.cancel()
    kept = sum(proxy.kept(way) for way in BOTH) - kept
    proxy.heal()
    good_s = await link.first_good(GOOD_S + 1.0)
    after_s, after = await rest_after(link.cluster, link.book.ended_at, lane.back_s + 1.0)
    held = leaks(rests) + leaks(after)
    in_time = back_s <= lane.back_s and good_s is not None and good_s <= GOOD_S
    passed = in_time and kept > 0 and not held and after_s <= lane.back_s
    figure = (
        f"{CLOCK.now() - began:.0f} s, {kept} bytes kept back; all blocks back after {back_s:.1f} s (at most "
        f"{lane.back_s:.0f}), first good transfer after "
        f"{'never' if good_s is None else f'{good_s:.2f} s'}{held}"
    )
    figures = {"back_s": round(back_s, 2), "good_s": good_s, "bytes_kept": kept}
    main = (good_s or 2 * GOOD_S, "s from the end to the first good transfer", GOOD_S)
    return Proof(f"partition, {partition.name}", passed, figure, figures, main=main)


async def _flap(proxy: Proxy, partition: _Partition) -> None:
    while True:
        await asyncio.sleep(FLAP_S)
        proxy.heal()
        await asyncio.sleep(FLAP_S)
        proxy.shut(*partition.ways)


# Restarts.


async def prove_restarts(setting: Setting) -> list[Proof]:
    peers, workers = await asyncio.gather(asyncio.to_thread(_peers, setting), _workers(setting))
    return [peers, workers]


async def _workers(setting: Setting) -> Proof:
    """SIGKILL of a prefill worker with requests under way; its next life has the same ports."""
    times: list[float] = []
    port = next(procfs.internal_ports(HOST, SystemEntropy()))
    settings = ["transfer.order=tcp", f"prefill-0:transfer.tcp_port={port}"]
    async with cluster_of(setting, "workers", "p=1,d=1", settings) as (cluster, book):
        link = Link(setting, cluster, book)
        await book.send(link.take(NUM_REQUESTS))
        pids = {cluster.pid("prefill-0")}
        for _ in range(setting.lane.worker_restarts):
            under_way = asyncio.create_task(book.send(link.take(4)))
            await asyncio.sleep(0.05)
            os.kill(cluster.pid("prefill-0"), signal.SIGKILL)
            await _until_replaced(cluster, pids)
            good_s = await link.first_good(GOOD_S + 1.0)
            times.append(GOOD_S + 1.0 if good_s is None else good_s)
            await under_way
        back_s, rests = await rest_after(cluster, book.ended_at, setting.lane.back_s + 1.0)
        errors = cluster.logged_errors()
        verdict = await asyncio.to_thread(Verdict.of, book)
    passed = verdict.good and max(times) <= GOOD_S and back_s <= setting.lane.back_s and not errors
    passed = passed and book.longest_s <= HANG_S and len(pids) == setting.lane.worker_restarts + 1
    figure = (
        f"{len(pids) - 1} restarts: first good transfer after {percentile(times, 0.5):.2f} s (median), "
        f"{max(times):.2f} s (most); longest answer {book.longest_s:.1f} s; "
        f"{verdict}{leaks(rests)}{said(errors)}"
    )
    main = (max(times), "s from ready to the first good transfer, the longest", GOOD_S)
    passed = passed and not leaks(rests)
    return Proof("prefill restarted at its host and port", passed, figure, {"good_s": times}, main=main)


async def _until_replaced(cluster: Cluster, pids: set[int]) -> None:
    """The router is connected to a process that was not there before; it joins ``pids``."""

    async def is_new() -> bool:
        pid = cluster.pid("prefill-0")
        return pid not in pids and pid != 0

    if await until(is_new, 30.0) is None:
        raise TimeoutError("the prefill worker did not come back")
    await cluster.until_whole()
    pids.add(cluster.pid("prefill-0"))


class _FixedPeer:
    """A peer process that listens at a port of ours, without a worker around it: it starts in no time."""

    def __init__(self, port: int, life: int) -> None:
        argv = [sys.executable, "-m", "tests.chaos.handoff_peer", str(port), f"{life:032x}", str(life)]
        self._process = subprocess.Popen(
            argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.info = msgspec.msgpack.decode(base64.b64decode(str(self._answer())), type=AgentInfo)

    def _answer(self) -> object:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        raise RuntimeError("the peer process died")

    def commit(self, block: int, seed: int) -> BlockRef:
        assert self._process.stdin is not None
        self._process.stdin.write(f"commit 0 {block} {seed}\n")
        answer = self._answer()
        assert isinstance(answer, list)
        return BlockRef(block, answer[0], tuple(answer[1]))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


def _peers(setting: Setting) -> Proof:
    """A peer is killed while it is read, and another one takes its place at the same port; who reads goes on
    with the same agent, and asks for the old life's blocks too."""
    rng = random.Random(f"{setting.seed}/peers")
    port = next(procfs.internal_ports(HOST, SystemEntropy()))
    reader, wrong, ghosts = Reader("tcp", None, deadline_s=GOOD_S + 1.0), 0, 0
    times: list[float] = []
    peer = _FixedPeer(port, 1)
    try:
        for life in range(2, PEER_RESTARTS + 2):
            old, ref = peer.info, peer.commit(0, life)
            wrong += _pulled(reader, old, [ref], [life]) not in ("good", "")
            refs = [peer.commit(block, 100 + block) for block in range(1, 9)]
            reader.submit(old, 0, refs, list(range(1, 9)))
            if rng.random() < 0.5:
                reader.outcomes.get(timeout=2 * GOOD_S)
                peer.kill()
            else:
                peer.kill()
                reader.outcomes.get(timeout=2 * GOOD_S)
            peer = _FixedPeer(port, life)
            began, fresh = CLOCK.now(), peer.commit(0, 1000 + life)
            while (answer := _pulled(reader, peer.info, [fresh], [1000 + life])) == "lost":
                if CLOCK.now() - began > GOOD_S + 1.0:
                    break
            times.append(CLOCK.now() - began)
            wrong += answer != "good"
            ghosts += _pulled(reader, old, [ref], [life]) == "good"
    finally:
        reader.close()
        peer.kill()
    passed = not (wrong or ghosts) and max(times) <= GOOD_S and len(times) == PEER_RESTARTS
    figure = (
        f"{len(times)} restarts: first good transfer after {percentile(times, 0.5) * 1000:.0f} ms (median), "
        f"{max(times) * 1000:.0f} ms (most); {wrong} wrong, {ghosts} reads of a dead life"
    )
    main = (max(times), "s from ready to the first good transfer, the longest", GOOD_S)
    return Proof("peer restarted at its host and port", passed, figure, {"good_s": times}, main=main)


def _pulled(reader: Reader, producer: AgentInfo, refs: list[BlockRef], seeds: Sequence[int]) -> str:
    """ "good", "lost" (nothing came), or "wrong"."""
    outcome = reader.pull(producer, 0, refs, list(range(len(refs))))
    if outcome.reason:
        return "lost"
    right = all(reader.bytes_of(0, local) == content(0, seed) for local, seed in enumerate(seeds))
    return "good" if right else "wrong"
