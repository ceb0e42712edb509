"""The encoder's engine, turn by turn: room for embeddings is waited for, and whose fault it is is said."""

from __future__ import annotations

from collections.abc import Callable

from shared.clock import ManualClock
from shared.engine.encoder_core import EncoderCore, EncoderParts, MediaPreparer, Prepared
from shared.engine.inbox import Inbox, Outbox
from shared.engine.owners import Owners
from shared.errors import InvalidMedia, TriptychError
from shared.failpoints import Failpoints
from shared.kv_cache.block_pool import BlockPool
from shared.kv_cache.encoder_cache import EncoderCache
from shared.kv_cache.leases import LeaseTable
from shared.runner.base import EncoderRunner
from shared.scheduler.encoder_scheduler import EncoderLimits, EncoderScheduler
from shared.step import EncodePlan, EncodeResult
from shared.telemetry.tracing import NullTracer
from shared.types.transfer import AgentInfo
from shared.types.worker import Abort, Encode, Event, Failed, HandoffReady

ROWS = 4
ROUTER = "router"


class Preparer(MediaPreparer):
    """As many rows as bytes; empty media are refused."""

    def prepare(self, data: bytes, done: Callable[[Prepared | TriptychError], None]) -> None:
        done(Prepared(data, (), len(data)) if data else InvalidMedia("empty", param="messages[0]"))

    async def close(self) -> None:
        pass


class Runner(EncoderRunner):
    def execute(self, plan: EncodePlan) -> EncodeResult:
        return EncodeResult(plan.step_id, tuple(item.num_rows for item in plan.items))

    def close(self) -> None:
        pass


class Bench:
    """An encoder with room for two items of four rows."""

    def __init__(self) -> None:
        self.clock = ManualClock(1.0)
        self.pool = BlockPool(2)
        self.cache = EncoderCache(self.pool, ROWS)
        self.events: list[Event] = []
        inbox, outbox = Inbox(), Outbox()
        outbox.subscribe(ROUTER, self.events.extend)
        self.core = EncoderCore(
            EncoderParts(
                scheduler=EncoderScheduler(EncoderLimits(64, 8)),
                cache=self.cache,
                runner=Runner(),
                preparer=Preparer(),
                leases=LeaseTable(self.clock, 30.0),
                agent=lambda: AgentInfo("encoder-0", "i", 1, (), ()),
                pool=self.pool,
                row_bytes=8,
                dtype="uint64",
                max_held_media_bytes=1 << 20,
                tracer=NullTracer(),
                clock=self.clock,
                failpoints=Failpoints(),
                inbox=inbox,
                outbox=outbox,
                owners=Owners(outbox, self.clock, 60.0, 5.0),
                incarnation="i",
            )
        )
        self._inbox, self._outbox = inbox, outbox

    def ask(self, request_id: str, *media: bytes) -> None:
        hashes = tuple(data.hex() for data in media)
        for mm_hash, data in zip(hashes, media, strict=True):
            self.core.put_media(mm_hash, data)
        self.core.submit(ROUTER, [Encode(request_id, hashes)])

    def turn(self) -> list[Event]:
        """One turn of the engine thread; what it said."""
        self.events.clear()
        self._inbox.run()
        self.core.tick()
        self.core.step()
        self._inbox.run()
        self._outbox.flush()
        return list(self.events)


def ready(events: list[Event]) -> list[str]:
    return [e.request_id for e in events if isinstance(e, HandoffReady)]


def failed(events: list[Event]) -> list[Failed]:
    return [e for e in events if isinstance(e, Failed)]


def test_a_picture_waits_for_room_that_a_reader_will_free() -> None:
    bench = Bench()
    for name in (b"aaaa", b"bbbb", b"cccc"):
        bench.ask(name.decode(), name)
    assert ready(bench.turn() + bench.turn()) == ["aaaa", "bbbb"]
    assert not bench.turn()
    bench.core._p.inbox.post(lambda: bench.core.verified(b"aaaa " + b"aaaa".hex().encode()))
    events = bench.turn() + bench.turn()
    assert ready(events) == ["cccc"] and not failed(events)
    bench.core.submit(ROUTER, [Abort("bbbb"), Abort("cccc")])
    bench.turn()
    assert bench.core.status().num_blocks_held == 0 and bench.core.status().num_leases == 0
    bench.cache.check_integrity()


def test_the_end_of_a_lease_makes_room_too() -> None:
    bench = Bench()
    for name in (b"aaaa", b"bbbb", b"cccc"):
        bench.ask(name.decode(), name)
    bench.turn()
    bench.clock.advance(31.0)
    assert ready(bench.turn() + bench.turn()) == ["cccc"]


def test_one_that_is_waited_for_no_more_takes_no_room() -> None:
    bench = Bench()
    for name in (b"aaaa", b"bbbb", b"cccc", b"dddd"):
        bench.ask(name.decode(), name)
    bench.turn()
    bench.core.submit(ROUTER, [Abort("cccc"), Abort("aaaa")])
    assert ready(bench.turn() + bench.turn()) == ["dddd"]


def test_what_no_waiting_can_help_fails_at_once_and_may_go_elsewhere() -> None:
    bench = Bench()
    bench.ask("large", b"x" * 12)
    events = bench.turn()
    assert [(e.code, e.retryable) for e in failed(events)] == [("overloaded", True)]
    bench.ask("three", b"aaaa", b"bbbb", b"cccc")
    events = bench.turn() + bench.turn()
    assert [e.code for e in failed(events)] == ["overloaded"]
    assert bench.core.status().num_blocks_held == 0
    bench.cache.check_integrity()


def test_a_bad_picture_names_the_field_to_blame() -> None:
    bench = Bench()
    bench.ask("bad", b"")
    [error] = failed(bench.turn())
    assert (error.code, error.param, error.retryable) == ("invalid_image", "messages[0]", False)


def test_turns_are_counted_also_when_there_is_nothing_to_do() -> None:
    bench = Bench()
    before = bench.core.status()
    bench.turn()
    assert bench.core.status().turns > before.turns and bench.core.status().steps == before.steps
