"""Embeddings in the store: pulled, pinned, evicted, written below at second use, and brought back."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from shared.clock import CountingEntropy, ManualClock
from shared.kernels.checksum import packed_checksum
from shared.telemetry import metrics
from shared.tiering.embeddings import MISS, EmbeddingStore, RowFormat
from shared.tiering.kv_store import Limits
from shared.tiering.pulls import Pulls
from shared.tiering.record import Record, decode_header, embedding_key, encode_header
from shared.transfer.arena import Arena, plan_region
from shared.transfer.handoff import Pull, PullOutcome
from shared.types.identity import IdentityKey
from shared.types.store import EmbeddingHit, EmbeddingKey
from shared.types.transfer import AgentInfo, EcTransferParams
from tests.fakes.tiers import DictTier, below

IDENTITY = IdentityKey("m", "r", "t", "float32")
ROWS = RowFormat(rows_per_block=2, row_bytes=24, dtype="float32")
NUM_BLOCKS = 6
REGION = plan_region("ec", (64,), (ROWS.extent_bytes,))
PRODUCER = AgentInfo("encoder", "b" * 32, 1, (), (REGION,))


def key(n: int, num_rows: int = 3, **fields: Any) -> EmbeddingKey:
    made = EmbeddingKey(bytes([n]) * 32, "options", "processor", bytes(32), num_rows, 24, "float32")
    return msgspec.structs.replace(made, **fields)


def rows_of(wanted: EmbeddingKey) -> bytes:
    count = wanted.num_rows * wanted.row_bytes
    return bytes((wanted.media_hash[0] * 31 + i) % 251 for i in range(count))


class Bench:
    """A store whose pulls end when the test says so, with the bytes of ``rows_of``."""

    def __init__(self) -> None:
        self.clock = ManualClock(100.0)
        self.disk = DictTier()
        self.lower, self.reactor = below(self.clock, self.disk)
        self.arena = Arena.create("ec", (NUM_BLOCKS,), (ROWS.extent_bytes,), "a" * 32)
        self.own = AgentInfo("store", "a" * 32, 1, (), (self.arena.info,))
        self.pulls: list[Pull] = []
        self._pulls = Pulls("ec", lambda outcome: None)
        self._pulls.bind(self)
        self.store = self.open()
        self.answers: list[bool] = []
        self.hits: list[EmbeddingHit] = []

    def open(self) -> EmbeddingStore:
        return EmbeddingStore(
            IDENTITY,
            ROWS,
            self.arena,
            lambda: self.own,
            self._pulls,
            self.lower,
            self.clock,
            CountingEntropy(),
            Limits("lru", 1.0, lease_s=10),
        )

    def submit(self, pull: Pull) -> None:
        self.pulls.append(pull)

    def params(self, wanted: EmbeddingKey) -> EcTransferParams:
        num_blocks = -(-wanted.num_rows // ROWS.rows_per_block)
        return EcTransferParams(
            handoff_id="offer",
            producer=PRODUCER,
            mm_hash="m",
            num_rows=wanted.num_rows,
            row_bytes=wanted.row_bytes,
            dtype=wanted.dtype,
            block_ids=tuple(range(num_blocks)),
            generations=(1,) * num_blocks,
            checksum=packed_checksum([rows_of(wanted)]),
        )

    def offer(self, wanted: EmbeddingKey, **fields: Any) -> None:
        params = msgspec.structs.replace(self.params(wanted), **fields)
        self.store.offer(wanted, params, self.answers.append)

    def end(self, wanted: EmbeddingKey, reason: str = "", *, terminal: bool = True) -> str:
        pull = self.pulls.pop(0)
        assert pull.packed is not None and pull.packed.num_bytes == len(rows_of(wanted))
        data = rows_of(wanted)
        for n, block in enumerate(pull.blocks):
            part = data[n * ROWS.extent_bytes : (n + 1) * ROWS.extent_bytes]
            self.arena.block(0, block.local_block)[: len(part)] = part
        ok = (not reason,) * len(pull.blocks)
        self._pulls.on_outcome(PullOutcome(pull.pull_id, ok, reason, terminal, 0, 0.0, "shm"))
        return pull.pull_id

    def settle(self, pull_id: str) -> None:
        self._pulls.on_settled(pull_id)

    def fill(self, wanted: EmbeddingKey) -> None:
        self.offer(wanted)
        self.end(wanted)
        assert self.answers.pop()

    def ask(self, wanted: EmbeddingKey) -> EmbeddingHit:
        self.store.lookup(wanted, self.hits.append)
        self.reactor.run()
        return self.hits.pop()

    def found(self, wanted: EmbeddingKey) -> bool:
        """Whether it is there; the bytes are right, and the lease is given back."""
        hit = self.ask(wanted)
        if hit.params is None:
            assert hit == MISS
            return False
        blocks = b"".join(bytes(self.arena.block(0, block_id)) for block_id in hit.params.block_ids)
        assert blocks[: len(rows_of(wanted))] == rows_of(wanted)
        assert hit.params.checksum == packed_checksum([rows_of(wanted)])
        assert (hit.params.num_rows, hit.params.producer) == (wanted.num_rows, self.own)
        self.store.release([hit.lease_id])
        return True

    def check(self) -> None:
        self.store.check_integrity()
        assert (self.store.num_leases, self.store.num_quarantined) == (0, 0)
        assert self.store.num_free == self.store.num_blocks == NUM_BLOCKS


def failures() -> float:
    return sum(s.value for m in metrics.PROMOTION_FAILURES.collect() for s in m.samples if "total" in s.name)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.reactor.run()
    made.check()
    made.arena.close()


def test_what_was_offered_is_found_once_its_pull_was_good(bench: Bench) -> None:
    bench.offer(key(1))
    bench.store.lookup(key(1), bench.hits.append)
    assert bench.answers == bench.hits == []
    bench.end(key(1))
    assert bench.answers == [True]
    bench.store.release([bench.hits.pop().lease_id])
    assert bench.found(key(1))
    bench.offer(key(1))
    assert (bench.answers, bench.pulls) == ([True, True], [])


@pytest.mark.parametrize(
    "fields",
    [
        {"decode_options": "other"},
        {"processor_version": "other"},
        {"salt_digest": b"o" * 32},
        {"media_hash": b"\1" * 31 + b"\2"},
        {"num_rows": 4},
        {"row_bytes": 16},
        {"dtype": "float16"},
    ],
)
def test_whatever_decides_embeddings_decides_the_hit(bench: Bench, fields: dict[str, Any]) -> None:
    bench.fill(key(1))
    assert not bench.found(key(1, **fields))


@pytest.mark.parametrize("reason", ["corrupt", "stale", "peer_lost"])
def test_a_pull_that_failed_leaves_nothing(bench: Bench, reason: str) -> None:
    bench.offer(key(1))
    bench.end(key(1), reason)
    assert bench.answers == [False] and not bench.found(key(1))


def test_a_pull_that_may_still_land_keeps_its_blocks_out_of_use(bench: Bench) -> None:
    bench.offer(key(1))
    pull_id = bench.end(key(1), "timeout", terminal=False)
    assert bench.store.num_quarantined == 2
    bench.settle(pull_id)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_rows": 4},
        {"row_bytes": 48},
        {"dtype": "float16"},
        {"block_ids": (1,), "generations": (1,)},
        {"generations": (1,)},
        {"producer": AgentInfo("encoder", "b" * 32, 1, (), ())},
        {"producer": AgentInfo("encoder", "b" * 32, 1, (), (plan_region("ec", (64,), (96,)),))},
    ],
)
def test_an_offer_that_does_not_fit_is_refused(bench: Bench, fields: dict[str, Any]) -> None:
    bench.offer(key(1), **fields)
    assert (bench.answers, bench.pulls) == ([False], [])


def test_room_comes_from_the_longest_unused_and_never_from_what_is_read(bench: Bench) -> None:
    for n in (1, 2, 3):
        bench.fill(key(n))
    hit = bench.ask(key(1))
    bench.fill(key(4, num_rows=4))
    assert [n for n in (1, 2, 3) if bench.found(key(n))] == [1, 3]
    bench.offer(key(5, num_rows=12))
    assert bench.answers == [False]  # more than could ever be free
    bench.store.release([hit.lease_id])


def test_a_lease_ends(bench: Bench) -> None:
    bench.fill(key(1))
    bench.ask(key(1))
    assert bench.store.num_leases == 1
    bench.clock.advance(10)
    bench.store.expire()


def test_second_use_is_written_below_and_comes_back_after_a_restart(bench: Bench) -> None:
    bench.fill(key(1))
    bench.reactor.run()
    assert not bench.disk.records
    assert bench.found(key(1))
    (name,) = bench.disk.records
    assert name == Record(IDENTITY, None, decode_header(bench.disk.records[name][0]).content, (0,), 72).key
    bench.arena.close()
    bench.arena = Arena.create("ec", (NUM_BLOCKS,), (ROWS.extent_bytes,), "a" * 32)
    bench.store = bench.open()
    assert bench.found(key(1)) and bench.disk.num_loaded == 1
    assert bench.found(key(1)) and bench.disk.num_loaded == 1
    assert not bench.found(key(2))


def test_the_key_is_that_of_the_record_format(bench: Bench) -> None:
    wanted = key(1, salt_digest=hashlib.sha256(b"salt").digest())
    bench.fill(wanted)
    assert bench.found(wanted)
    (name,) = bench.disk.records
    assert name == embedding_key(
        IDENTITY, wanted.media_hash, decode_options="options", processor_version="processor", salt="salt"
    )


@pytest.mark.parametrize("where", ["payload", "header"])
def test_a_damaged_record_is_a_counted_miss(bench: Bench, where: str) -> None:
    bench.fill(key(1))
    assert bench.found(key(1))
    (name,) = bench.disk.records
    header, payload = bench.disk.records[name]
    if where == "payload":
        payload = payload[:-1] + bytes([payload[-1] ^ 1])
    else:
        header = header[:30] + bytes([header[30] ^ 1]) + header[31:]
    bench.disk.records[name] = header, payload
    bench.store = bench.open()
    before = failures()
    assert not bench.found(key(1))
    assert failures() == before + 1 and not bench.disk.records


def test_another_models_record_is_a_miss(bench: Bench) -> None:
    bench.fill(key(1))
    assert bench.found(key(1))
    ((name, (header, payload)),) = bench.disk.records.items()
    foreign = msgspec.structs.replace(decode_header(header), identity=IdentityKey("o", "r", "t", "float32"))
    bench.disk.records[name] = encode_header(foreign), payload
    bench.store = bench.open()
    assert not bench.found(key(1)) and not bench.disk.records


def test_look_ups_share_a_load_and_do_not_wait_beyond_the_deadline(bench: Bench) -> None:
    bench.fill(key(1))
    assert bench.found(key(1))
    bench.store = bench.open()
    bench.disk.held = True
    for _ in range(2):
        bench.store.lookup(key(1), bench.hits.append)
    bench.clock.advance(1.0)
    bench.reactor.run()
    assert bench.hits == [MISS, MISS]
    bench.hits.clear()
    bench.disk.held = False
    bench.disk.release()
    bench.reactor.run()
    assert bench.hits == [] and bench.disk.num_loaded == 1
    assert bench.found(key(1)) and bench.disk.num_loaded == 1
