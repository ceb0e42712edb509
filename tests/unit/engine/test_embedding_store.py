"""An encoder with a kv_store: what is found is not encoded, what is encoded is offered; trouble is a miss."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from shared.clock import ManualClock
from shared.engine.desk import PullDesk
from shared.engine.embedding_store import RemoteEmbeddingLink
from shared.engine.encoder_core import EncoderCore, EncoderParts, MediaPreparer, Prepared
from shared.engine.inbox import Inbox, Outbox
from shared.engine.owners import Owners
from shared.engine.tier_costs import TierCosts
from shared.errors import InvalidMedia, TriptychError
from shared.failpoints import Failpoints
from shared.kv_cache.block_pool import BlockPool
from shared.kv_cache.encoder_cache import EncoderCache
from shared.kv_cache.leases import LeaseTable
from shared.runner.base import EncoderRunner
from shared.scheduler.encoder_scheduler import EncoderLimits, EncoderScheduler
from shared.step import EncodePlan, EncodeResult
from shared.telemetry.tracing import NullTracer
from shared.tiering.embedding_pool import NOT_FOUND, FoundEmbedding
from shared.tiering.nodes import NodeLease
from shared.transfer.handoff import Pull, PullOutcome
from shared.types.store import EmbeddingKey
from shared.types.transfer import AgentInfo, EcTransferParams
from shared.types.worker import Abort, Encode, Event, Failed, HandoffReady

ROUTER = "router"
STORE = AgentInfo("store.ec", "s", 1, (), ())
LEASE = NodeLease("store:1", "lease")
CHECKSUM = 77


class Media(MediaPreparer):
    """As many rows as bytes; empty media are refused. The format of their embeddings, too."""

    processor_version, decode_options, row_bytes, dtype, rows_per_block = "p1", "o1", 8, "uint64", 4

    def __init__(self) -> None:
        self.num_prepared = 0

    def num_rows(self, data: bytes) -> int:
        if not data:
            raise InvalidMedia("empty", param="messages[0]")
        return len(data)

    def prepare(self, data: bytes, done: Callable[[Prepared | TriptychError], None]) -> None:
        self.num_prepared += 1
        done(Prepared(data, (), len(data)) if data else InvalidMedia("empty", param="messages[0]"))

    async def close(self) -> None:
        pass


class Runner(EncoderRunner):
    """Takes a second a step."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.num_encoded = 0

    def execute(self, plan: EncodePlan) -> EncodeResult:
        self._clock.advance(1.0)
        self.num_encoded += len(plan.items)
        return EncodeResult(plan.step_id, tuple(CHECKSUM for _ in plan.items))

    def close(self) -> None:
        pass


class Calls:
    """A store whose answers and pulls wait for the test."""

    def __init__(self) -> None:
        self.usable = True
        self.lookups: list[tuple[EmbeddingKey, Callable[[FoundEmbedding], None]]] = []
        self.offers: list[tuple[EmbeddingKey, EcTransferParams, Callable[[], None]]] = []
        self.released: list[NodeLease] = []

    def lookup(self, key: EmbeddingKey, rows_per_block: int, done: Callable[[FoundEmbedding], None]) -> None:
        assert rows_per_block == 4
        self.lookups.append((key, done))

    def release(self, lease: NodeLease) -> None:
        self.released.append(lease)

    def offer(self, key: EmbeddingKey, params: EcTransferParams, done: Callable[[], None]) -> None:
        self.offers.append((key, params, done))

    def answer(self, **fields: object) -> None:
        """The oldest look-up finds what it asked for, but for ``fields``."""
        key, done = self.lookups.pop(0)
        num_blocks = -(-key.num_rows // 4)
        given = {
            "handoff_id": "lease",
            "producer": STORE,
            "mm_hash": "any",
            "num_rows": key.num_rows,
            "row_bytes": key.row_bytes,
            "dtype": key.dtype,
            "block_ids": tuple(range(10, 10 + num_blocks)),
            "generations": (3,) * num_blocks,
            "checksum": CHECKSUM,
        } | fields
        done(FoundEmbedding(EcTransferParams(**given), LEASE))

    def miss(self) -> None:
        self.lookups.pop(0)[1](NOT_FOUND)


class Bench:
    """An encoder with room for two items of four rows."""

    def __init__(self) -> None:
        self.clock = ManualClock(1.0)
        self.pool = BlockPool(2)
        self.cache = EncoderCache(self.pool, 4)
        self.calls, self.media, self.runner = Calls(), Media(), Runner(self.clock)
        self.events: list[Event] = []
        self.pulls: list[Pull] = []
        self._inbox, self._outbox = Inbox(), Outbox()
        self._outbox.subscribe(ROUTER, self.events.extend)
        self.desk = PullDesk(self._inbox)
        self.desk.bind(self)
        self.costs = TierCosts(self.clock, 64)
        agent = AgentInfo("encoder-0", "i", 1, (), ())
        link = RemoteEmbeddingLink(
            self.calls,
            self.cache,
            self.pool,
            self.desk,
            self._inbox,
            self.media,
            lambda: agent,
            costs=self.costs,
            deadline_s=5.0,
        )
        self.core = EncoderCore(
            EncoderParts(
                scheduler=EncoderScheduler(EncoderLimits(64, 8)),
                cache=self.cache,
                runner=self.runner,
                preparer=self.media,
                leases=LeaseTable(self.clock, 30.0),
                agent=lambda: agent,
                pool=self.pool,
                row_bytes=8,
                dtype="uint64",
                max_held_media_bytes=1 << 20,
                tracer=NullTracer(),
                clock=self.clock,
                failpoints=Failpoints(),
                inbox=self._inbox,
                outbox=self._outbox,
                owners=Owners(self._outbox, self.clock, 600.0, 5.0),
                incarnation="i",
                store=link,
            )
        )

    def submit(self, pull: Pull) -> None:
        self.pulls.append(pull)

    def cancel(self, pull_id: str) -> None:
        raise AssertionError("nothing is cancelled here")

    def notify(self, producer: AgentInfo, payload: bytes) -> None:
        raise AssertionError("a store is told by its own call")

    def land(self, reason: str = "", *, terminal: bool = True) -> str:
        pull = self.pulls.pop(0)
        ok = (not reason,) * len(pull.blocks)
        self.desk.deliver(PullOutcome(pull.pull_id, ok, reason, terminal, 32, 0.1, "shm"))
        return pull.pull_id

    def ask(self, request_id: str, data: bytes) -> None:
        self.core.put_media(data.hex(), data)
        self.core.submit(ROUTER, [Encode(request_id, (data.hex(),))])

    def turn(self) -> list[Event]:
        """Two turns of the engine thread; what it said."""
        self.events.clear()
        for _ in range(2):
            self._inbox.run()
            self.core.tick()
            self.core.step()
        self._inbox.run()
        self._outbox.flush()
        return list(self.events)

    def ready(self) -> list[str]:
        return [event.request_id for event in self.turn() if isinstance(event, HandoffReady)]

    def end(self, *request_ids: str) -> None:
        self.core.submit(ROUTER, [Abort(request_id) for request_id in request_ids])
        self.turn()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.end(*list(made.core._live))
    made.cache.check_integrity()
    assert made.core.status().num_leases == made.pool.num_quarantined == 0
    assert all(not made.cache.users(mm_hash) for mm_hash in made.cache._entries)
    assert not (made.core._preparing or made.core._encoding)


def test_what_the_store_has_costs_no_step(bench: Bench) -> None:
    bench.ask("a", b"aaaa")
    assert bench.ready() == []
    bench.calls.answer()
    assert bench.ready() == []
    (pull,) = bench.pulls
    assert (pull.region, pull.producer, pull.packed.num_bytes) == ("ec", STORE, 32)
    assert [(b.remote.block_id, b.remote.generation) for b in pull.blocks] == [(10, 3)]
    bench.land()
    (event,) = (e for e in bench.turn() if isinstance(e, HandoffReady))
    assert event.embeddings[0].checksum == CHECKSUM
    assert (bench.runner.num_encoded, bench.media.num_prepared, bench.core.num_steps) == (0, 0, 0)
    assert bench.calls.released == [LEASE] and bench.calls.offers == []


def test_all_who_wait_for_a_picture_get_it(bench: Bench) -> None:
    bench.ask("a", b"aaaa")
    bench.turn()
    bench.ask("b", b"aaaa")
    bench.calls.answer()
    bench.turn()
    bench.ask("c", b"aaaa")
    bench.turn()
    bench.land()
    assert sorted(bench.ready()) == ["a", "b", "c"]
    assert bench.cache.users(b"aaaa".hex()) == {"a", "b", "c"}


def test_what_is_encoded_is_offered_and_stays_until_it_was_read(bench: Bench) -> None:
    bench.ask("a", b"aaaa")
    bench.turn()
    bench.calls.miss()
    assert bench.ready() == ["a"]
    ((key, params, done),) = bench.calls.offers
    assert (key.num_rows, key.processor_version, params.checksum) == (4, "p1", CHECKSUM)
    bench.end("a")
    assert len(bench.cache.users(b"aaaa".hex())) == 1
    done()


def test_the_store_is_asked_what_the_key_says(bench: Bench) -> None:
    for data in (b"aaaa", b"bbbb"):
        bench.ask(data.decode(), data)
    bench.turn()
    (first, _), (second, _) = bench.calls.lookups
    assert len({first.media_hash, second.media_hash}) == 2 and len(first.media_hash) == 32
    bench.calls.miss()
    bench.calls.miss()
    assert sorted(bench.ready()) == ["aaaa", "bbbb"]
    assert {key.media_hash for key, _, _ in bench.calls.offers} == {first.media_hash, second.media_hash}
    for _, _, done in bench.calls.offers:
        done()


@pytest.mark.parametrize(
    "fields",
    [
        {"num_rows": 5},
        {"row_bytes": 16},
        {"dtype": "float32"},
        {"block_ids": (1, 2), "generations": (1, 2)},
        {"generations": ()},
    ],
)
def test_an_answer_that_does_not_fit_is_a_miss(bench: Bench, fields: dict[str, object]) -> None:
    bench.ask("a", b"aaaa")
    bench.turn()
    bench.calls.answer(**fields)
    assert bench.ready() == ["a"]
    assert (bench.pulls, bench.calls.released, bench.runner.num_encoded) == ([], [LEASE], 1)
    bench.calls.offers.pop()[2]()


def test_a_pull_that_fails_is_a_miss(bench: Bench) -> None:
    bench.ask("a", b"aaaa")
    bench.turn()
    bench.calls.answer()
    bench.turn()
    bench.land("corrupt")
    assert bench.ready() == ["a"] and bench.runner.num_encoded == 1
    bench.calls.offers.pop()[2]()


def test_a_pull_that_may_still_land_keeps_its_block_out_of_use(bench: Bench) -> None:
    bench.ask("a", b"aaaa")
    bench.turn()
    bench.calls.answer()
    bench.turn()
    pull_id = bench.land("timeout", terminal=False)
    assert bench.ready() == ["a"] and bench.pool.num_quarantined == 1
    bench.desk.settle(pull_id)
    bench.turn()
    bench.calls.offers.pop()[2]()


def test_without_room_for_what_is_found_it_waits_as_if_it_were_encoded(bench: Bench) -> None:
    for data in (b"aaaa", b"bbbb"):
        bench.ask(data.decode(), data)
        bench.turn()
        bench.calls.answer()
        bench.turn()
        bench.land()
        assert bench.ready() == [data.decode()]
    bench.ask("c", b"cccc")
    bench.turn()
    bench.calls.answer()
    assert bench.ready() == []
    bench.end("aaaa")
    assert "c" in bench.core._live and bench.runner.num_encoded == 1
    bench.calls.offers.pop()[2]()


def test_room_that_an_offer_holds_is_waited_for(bench: Bench) -> None:
    for data in (b"aaaa", b"bbbb", b"cccc"):
        bench.ask(data.decode(), data)
        bench.turn()
        bench.calls.miss()
        bench.turn()
        bench.end(*(name for name in ("aaaa", "bbbb") if name in bench.core._live))
    assert "cccc" in bench.core._live
    bench.calls.offers.pop(0)[2]()
    assert bench.ready() == ["cccc"]
    for _, _, done in bench.calls.offers:
        done()


def test_a_request_that_ended_meanwhile_leaves_what_arrives_for_the_next(bench: Bench) -> None:
    bench.ask("a", b"aaaa")
    bench.turn()
    bench.end("a")
    bench.calls.answer()
    bench.turn()
    bench.land()
    bench.turn()
    bench.ask("b", b"aaaa")
    assert bench.ready() == ["b"] and not bench.calls.lookups


def test_without_a_store_that_answers_nobody_is_asked_and_nothing_stays_for_it(bench: Bench) -> None:
    bench.calls.usable = False
    bench.ask("a", b"aaaa")
    assert bench.ready() == ["a"]
    assert bench.calls.lookups == bench.calls.offers == []
    assert bench.cache.users(b"aaaa".hex()) == {"a"}


def test_media_without_sense_is_the_preparers_to_refuse(bench: Bench) -> None:
    bench.core.put_media("e", b"")
    bench.core.submit(ROUTER, [Encode("a", ("e",))])
    assert [e.param for e in bench.turn() if isinstance(e, Failed)] == ["messages[0]"]
    assert bench.calls.lookups == []


def test_the_store_is_not_asked_where_encoding_is_measured_to_be_cheaper(bench: Bench) -> None:
    """Both are unknown at first: so they are tried. A step takes a second here, a load two."""
    bench.ask("a", b"aaaa")
    bench.turn()
    bench.calls.miss()
    assert bench.ready() == ["a"]
    bench.calls.offers.pop()[2]()
    bench.ask("b", b"bbbb")
    bench.turn()
    bench.clock.advance(2.0)
    bench.calls.answer()
    bench.turn()
    bench.land()
    assert bench.ready() == ["b"]
    bench.end("a", "b")
    bench.ask("c", b"cccc")
    assert bench.ready() == ["c"] and bench.calls.lookups == []
    bench.calls.offers.pop()[2]()
    bench.end("c")
    bench.clock.advance(120.0)  # what was measured is forgotten
    bench.ask("d", b"dddd")
    bench.turn()
    assert len(bench.calls.lookups) == 1
    bench.calls.miss()
    bench.turn()
    bench.calls.offers.pop()[2]()
