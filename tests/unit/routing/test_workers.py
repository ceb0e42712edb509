"""The live view: dialling, replacing, suspecting, losing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from msgspec import structs

from shared.clock import ManualClock
from shared.config.services import RoutingConfig
from shared.errors import WorkerLost
from shared.routing.workers import RETRY_S, Worker, WorkerPool
from shared.types.identity import IdentityKey
from shared.types.transfer import AgentInfo
from shared.types.worker import Abort, Command, Event, Released, Status, WorkerInfo, WorkerStatus


def info(worker_id: str = "d0", incarnation: str = "a", *, epoch: int = 1, port: int = 1) -> WorkerInfo:
    agent = AgentInfo(worker_id, incarnation, epoch, (), ())
    identity = IdentityKey("m", "r", "t", "float32")
    return WorkerInfo(worker_id, incarnation, "decode", f"host:{port}", "m", identity, agent)


class Link:
    """A link that says ``hello`` (None: never) and then whatever the test puts."""

    def __init__(self, hello: WorkerInfo | Exception | None) -> None:
        self.hello = hello
        self.sent: list[Command] = []
        self.queue: asyncio.Queue[list[Event] | None] = asyncio.Queue()
        self.closed = False

    async def connect(self) -> WorkerInfo:
        if self.hello is None:
            await asyncio.Event().wait()
        if isinstance(self.hello, Exception):
            raise self.hello
        assert self.hello is not None
        return self.hello

    def send(self, *commands: Command) -> None:
        self.sent += commands

    async def events(self) -> AsyncIterator[list[Event]]:
        while (batch := await self.queue.get()) is not None:
            yield batch
        raise WorkerLost("ended")

    async def put_media(self, mm_hash: str, data: bytes) -> None:
        raise AssertionError("no media here")

    async def close(self) -> None:
        self.closed = True


class Bench:
    """A pool, its links by dial, and what the listener was told."""

    def __init__(self) -> None:
        self.clock = ManualClock(10.0)
        self.links: list[Link] = []
        self.numbers: list[int] = []
        self.hellos: dict[str, WorkerInfo | Exception | None] = {}
        self.told: list[tuple[str, str]] = []
        self.delivered: list[Event] = []
        self.pool = WorkerPool(self._dial, self.clock, self, RoutingConfig(lost_s=3.0, suspect_s=2.0))

    def _dial(self, announced: WorkerInfo, number: int) -> Link:
        self.links.append(Link(self.hellos.get(announced.incarnation, announced)))
        self.numbers.append(number)
        return self.links[-1]

    def deliver(self, worker: Worker, events: list[Event]) -> None:
        self.delivered += events

    def worker_ready(self, worker: Worker) -> None:
        self.told.append(("ready", worker.info.incarnation))

    def worker_lost(self, worker: Worker) -> None:
        self.told.append(("lost", worker.info.incarnation))

    async def announce(self, announced: WorkerInfo) -> None:
        self.pool.announced(announced)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.pool.close()
    await bench.pool.close()
    assert all(link.closed for link in bench.links)


async def test_a_worker_is_dialled_once(bench: Bench) -> None:
    bench.pool.announced(info())
    await bench.announce(info())
    await bench.announce(info())
    assert len(bench.links) == 1 and bench.told == [("ready", "a")]
    assert list(bench.pool.usable()) == ["d0/a"]


async def test_stores_are_not_dialled(bench: Bench) -> None:
    await bench.announce(structs.replace(info(), kind="kv_store"))
    assert not bench.links


async def test_events_are_delivered_and_status_kept(bench: Bench) -> None:
    await bench.announce(info())
    status = WorkerStatus("a", num_running=3, num_waiting=2, num_blocks=9, num_blocks_free=4)
    bench.links[0].queue.put_nowait([Released("r"), Status(status)])
    await bench.settle()
    assert bench.delivered == [Released("r"), Status(status)]
    seen = bench.pool.live()[0].view()
    assert (seen.num_requests, seen.num_blocks, seen.num_blocks_free) == (5, 9, 4)


async def test_a_draining_worker_is_live_but_not_usable(bench: Bench) -> None:
    await bench.announce(info())
    bench.links[0].queue.put_nowait([Status(WorkerStatus("a", draining=True))])
    await bench.settle()
    assert bench.pool.live() and not bench.pool.usable()


async def test_the_end_of_a_stream_loses_its_worker_at_once(bench: Bench) -> None:
    await bench.announce(info())
    bench.links[0].queue.put_nowait(None)
    await bench.settle()
    assert bench.told == [("ready", "a"), ("lost", "a")] and not bench.pool.live() and bench.links[0].closed


async def test_a_lost_worker_is_dialled_again_after_a_pause(bench: Bench) -> None:
    await bench.announce(info())
    bench.links[0].queue.put_nowait(None)
    await bench.settle()
    await bench.announce(info())
    assert len(bench.links) == 1
    bench.clock.advance(RETRY_S)
    await bench.announce(info())
    assert bench.told[-1] == ("ready", "a") and bench.numbers == [1, 2]


async def test_silence_is_suspected_then_lost(bench: Bench) -> None:
    await bench.announce(info())
    worker = bench.pool.live()[0]
    for _ in range(5):
        bench.clock.advance(0.5)
        bench.pool.tick()
    assert worker.suspect and not worker.usable and not worker.lost
    bench.links[0].queue.put_nowait([Status(WorkerStatus("a"))])
    await bench.settle()
    assert worker.usable
    for _ in range(7):
        bench.clock.advance(0.5)
        bench.pool.tick()
    assert worker.lost and bench.told[-1] == ("lost", "a")
    await bench.settle()
    assert bench.links[0].closed


async def test_a_standstill_is_suspected_at_once_and_lost_later(bench: Bench) -> None:
    """The process answers, but its engine hangs."""
    await bench.announce(info())
    worker = bench.pool.live()[0]

    async def beat(turns: int) -> None:
        bench.links[0].queue.put_nowait([Status(WorkerStatus("a", turns=turns))])
        await bench.settle()
        bench.clock.advance(0.5)
        bench.pool.tick()

    for turns in range(1, 4):
        await beat(turns)
    assert worker.usable
    for _ in range(5):
        await beat(3)
    assert worker.suspect and not worker.lost
    await beat(4)
    assert worker.usable
    for _ in range(2 * 29):
        await beat(4)
    assert worker.suspect and not worker.lost
    for _ in range(4):
        await beat(4)
    assert worker.lost and bench.told[-1] == ("lost", "a")


async def test_nothing_passes_to_or_from_a_lost_worker(bench: Bench) -> None:
    await bench.announce(info())
    worker = bench.pool.live()[0]
    bench.pool.withdrawn("d0", "a")
    worker.send(Abort("r"))
    bench.links[0].queue.put_nowait([Released("r")])
    await bench.settle()
    assert not bench.links[0].sent and not bench.delivered and bench.told[-1] == ("lost", "a")


async def test_a_goodbye_of_an_earlier_life_is_ignored(bench: Bench) -> None:
    await bench.announce(info())
    bench.pool.withdrawn("d0", "z")
    bench.pool.withdrawn("d9", "a")
    assert len(bench.pool) == 1


async def test_a_new_incarnation_replaces_the_old_one(bench: Bench) -> None:
    await bench.announce(info())
    await bench.announce(info(incarnation="b", port=2))
    assert bench.told == [("ready", "a"), ("lost", "a"), ("ready", "b")]
    assert list(bench.pool.usable()) == ["d0/b"]


async def test_the_old_incarnation_serves_until_the_new_one_answers(bench: Bench) -> None:
    await bench.announce(info())
    bench.hellos["b"] = None
    await bench.announce(info(incarnation="b", port=2))
    assert len(bench.links) == 2 and list(bench.pool.usable()) == ["d0/a"]


async def test_stale_news_of_the_same_address_do_not_disturb_a_live_stream(bench: Bench) -> None:
    await bench.announce(info(incarnation="b"))
    await bench.announce(info(incarnation="a"))
    assert len(bench.links) == 1


async def test_a_higher_epoch_is_taken_over(bench: Bench) -> None:
    await bench.announce(info())
    await bench.announce(info(epoch=4))
    await bench.announce(info(epoch=2))
    assert bench.pool.live()[0].info.agent.epoch == 4 and len(bench.links) == 1


async def test_a_stranger_at_the_address_is_not_taken_in(bench: Bench) -> None:
    bench.hellos["a"] = info("d7")
    await bench.announce(info())
    assert not bench.told and bench.links[0].closed


async def test_a_refused_connection_is_tried_again_later(bench: Bench) -> None:
    bench.hellos["a"] = WorkerLost("refused")
    await bench.announce(info())
    await bench.announce(info())
    assert len(bench.links) == 1 and bench.links[0].closed
    bench.hellos["a"] = info()
    bench.clock.advance(RETRY_S)
    await bench.announce(info())
    assert bench.told == [("ready", "a")]


async def test_a_worker_that_comes_back_is_told_to_drop_what_it_did(bench: Bench) -> None:
    await bench.announce(info())
    worker = bench.pool.live()[0]
    worker.attempts.update({"r-1": object(), "r-2": object()})
    bench.pool.withdrawn("d0", "a")
    bench.clock.advance(RETRY_S)
    await bench.settle()
    await bench.announce(info())
    bench.clock.advance(RETRY_S)
    await bench.announce(info())
    assert bench.links[-1].sent == [Abort("r-1"), Abort("r-2")]


async def test_a_pause_of_ours_is_no_silence_of_theirs(bench: Bench) -> None:
    await bench.announce(info())
    bench.clock.advance(60)
    bench.pool.tick()
    assert bench.pool.usable()
