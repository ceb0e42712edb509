"""Proof: a peer that is stopped in the middle of a read costs no more than the read's deadline, and when it
wakes nothing of what it still says counts.

Transfers go by tcp through a proxy in front of the peer, which sees the read of the blocks come, after their
first fence: at that moment, before the peer has it, the peer is stopped.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from itertools import count, islice

from msgspec import Struct

from services.cli.topology import ProcessSpec
from shared.transfer.tcp_server import FRAME, READ
from tests.chaos.cluster import Cluster
from tests.chaos.faults import process_state
from tests.chaos.handoff_base import (
    CLOCK,
    Book,
    Proof,
    Setting,
    Verdict,
    again,
    cluster_of,
    leaks,
    long_cases,
    plain_cases,
    rest_after,
    said,
    total,
    until,
)
from tests.chaos.handoff_files import LOADING, STORE_ONLY
from tests.chaos.handoff_links import through_proxy
from tests.chaos.proxy import Proxy, Way
from tests.chaos.records import Case

#: Longer than it takes the router to call a silent worker lost.
FROZEN_S = 4.0
#: Between the deadline of a pull and the moment when its end is counted and seen here.
LATE_S = 1.0
NUM_REQUESTS = 10


async def prove(setting: Setting) -> list[Proof]:
    return [await _prefill(setting), await _store(setting)]


class _Freeze(Struct):
    """What one freeze did. ``ended_s``: from the stop to the end of the pull; None: it did not end."""

    stopped: bool = False
    ended_s: float | None = None
    back_s: float = 0.0
    leaks: str = ""


async def _prefill(setting: Setting) -> Proof:
    """Decode reads from prefill."""
    with through_proxy("prefill-0") as (proxy, settings):
        async with cluster_of(setting, "prefill", "p=1,d=1", settings) as (cluster, book):
            (peer,) = cluster.of_kind("prefill")
            cases = _fresh(setting.seed)
            await book.send(list(islice(cases, NUM_REQUESTS)))
            freezes = []
            for _ in range(setting.lane.freezes):
                freezes.append(
                    await _freeze(setting, cluster, book, proxy, peer, "decode", lambda: _take(cases))
                )
                await cluster.until_whole()
            lost = await total(
                cluster, "router", "triptych_workers_lost_total", kind="prefill", reason="silent"
            )
            late = await total(cluster, "router", "triptych_late_events_total")
            again_good = await _good_transfer(cluster, book, "kv", lambda: _take(cases))
            errors = cluster.logged_errors()
            verdict = await asyncio.to_thread(Verdict.of, book)
    extra = f"{lost:.0f} times given up by the router, {late:.0f} late events dropped{said(errors)}"
    effective = lost >= setting.lane.freezes and not errors
    return _proof(
        setting, "SIGSTOP of prefill in mid-read", freezes, verdict, extra, effective and again_good
    )


async def _store(setting: Setting) -> Proof:
    """Prefill reads from the store."""
    with through_proxy("kv-store-0") as (proxy, settings):
        settings = [*settings, *STORE_ONLY]
        async with cluster_of(setting, "store", "p=1,d=1,s=1", settings, as_spec=LOADING) as (cluster, book):
            (peer,) = cluster.of_kind("kv_store")
            numbers = count()
            kept = list(islice(long_cases(setting.seed), NUM_REQUESTS))

            def repeated() -> list[Case]:
                return [again(case, next(numbers)) for case in kept]

            freezes = []
            for _ in range(setting.lane.freezes):
                await _good_transfer(cluster, book, "store", repeated)
                freezes.append(await _freeze(setting, cluster, book, proxy, peer, "prefill", repeated))
            again_good = await _good_transfer(cluster, book, "store", repeated)
            errors = cluster.logged_errors()
            verdict = await asyncio.to_thread(Verdict.of, book)
    effective = again_good and not errors
    return _proof(setting, "SIGSTOP of kv_store in mid-read", freezes, verdict, said(errors), effective)


async def _freeze(
    setting: Setting,
    cluster: Cluster,
    book: Book,
    proxy: Proxy,
    peer: ProcessSpec,
    reader: str,
    requests: Callable[[], list[Case]],
) -> _Freeze:
    """Stop the peer at the next read of blocks, wait, wake it, wait until all is back."""
    pid, found, at = cluster.pid(peer.name), _Freeze(), 0.0

    def stop(way: Way, data: bytes) -> None:
        nonlocal at
        if way is Way.THERE and not at and _reads_blocks(data):
            at = CLOCK.now()
            os.kill(pid, signal.SIGSTOP)

    failures = await _failures(cluster, reader)

    async def has_ended() -> bool:
        return await _failures(cluster, reader) > failures

    async def has_stopped() -> bool:
        return at > 0.0

    proxy.seen = stop
    try:
        load = asyncio.create_task(book.send(requests(), per_second=20))
        if await until(has_stopped, 10.0, 0.005) is not None:
            found.stopped = process_state(pid) == "T"
            if await until(has_ended, setting.lane.deadline_s + LATE_S, 0.02) is not None:
                found.ended_s = CLOCK.now() - at
            await asyncio.sleep(max(0.0, at + FROZEN_S - CLOCK.now()))
    finally:
        proxy.seen = lambda way, data: None
        os.kill(pid, signal.SIGCONT)
    woken = CLOCK.now()
    await load
    found.back_s, rests = await rest_after(cluster, max(woken, book.ended_at), setting.lane.back_s + 1.0)
    found.leaks = leaks(rests)
    return found


def _reads_blocks(data: bytes) -> bool:
    """Whether there is a read in it that does not begin where arenas do, as those of fences."""
    if len(data) < FRAME.size + 8:
        return False
    kind, *_ = FRAME.unpack_from(data)
    return kind == READ and data[FRAME.size : FRAME.size + 8] != bytes(8)


async def _failures(cluster: Cluster, reader: str) -> float:
    """Pulls that did not end well, or were called off."""
    found = await total(cluster, reader, "triptych_transfer_failures_total")
    return found + await total(cluster, "router", "triptych_migrations_total")


async def _good_transfer(cluster: Cluster, book: Book, kind: str, requests: Callable[[], list[Case]]) -> bool:
    """Whether bytes come over the wire again, soon."""

    def moved() -> Awaitable[float]:
        return total(cluster, "", "triptych_transfer_bytes_total", backend="tcp", kind=kind)

    before = await moved()

    async def has_moved() -> bool:
        await book.send(requests())
        return await moved() > before

    return await until(has_moved, 10.0) is not None


def _fresh(seed: int) -> islice[Case]:
    return islice(plain_cases(seed), None)


def _take(cases: islice[Case]) -> list[Case]:
    return list(islice(cases, NUM_REQUESTS))


def _proof(
    setting: Setting, name: str, freezes: list[_Freeze], verdict: Verdict, extra: str, effective: bool
) -> Proof:
    ended = [freeze.ended_s for freeze in freezes if freeze.ended_s is not None]
    held = "".join(freeze.leaks for freeze in freezes)
    back = max(freeze.back_s for freeze in freezes)
    bound = setting.lane.deadline_s + LATE_S
    passed = (
        all(freeze.stopped for freeze in freezes)
        and len(ended) == len(freezes)
        and max(ended) <= bound
        and back <= setting.lane.back_s
        and verdict.good
        and effective
        and not held
    )
    slowest = f"{max(ended):.2f} s" if ended else "never"
    figure = (
        f"{sum(f.stopped for f in freezes)} of {len(freezes)} stopped in mid-read, pull over after {slowest} "
        f"(at most {bound:.0f} s), all back {back:.1f} s after waking; {verdict}{held}"
    )
    figure += f"; {extra.removeprefix('; ')}" if extra else ""
    main = (max(ended, default=bound + 1), "s until the pull is over", bound)
    return Proof(name, passed, figure, {"pull_s": ended, "back_s": round(back, 2)}, main=main)
