"""When the store's memory for embeddings is made, and for whom."""

from __future__ import annotations

import msgspec
import pytest

from services.kv_store.servicer import StoreService
from shared.clock import CountingEntropy, ManualClock
from shared.tiering.embeddings import MISS, EmbeddingStore, RowFormat
from shared.tiering.kv_store import KvStore, Limits
from shared.tiering.pulls import Pulls
from shared.transfer.arena import Arena, plan_region
from shared.transfer.handoff import Pull
from shared.types.identity import IdentityKey, LayoutSpec
from shared.types.store import EmbeddingKey
from shared.types.transfer import AgentInfo, EcTransferParams
from shared.types.worker import WorkerInfo
from tests.fakes.tiers import DictTier, below

IDENTITY = IdentityKey("m", "r", "t", "float32")
KEY = EmbeddingKey(bytes(32), "", "", bytes(32), 3, 8, "float32")
PRODUCER = AgentInfo("encoder", "b" * 32, 1, (), (plan_region("ec", (8,), (16,)),))
ROWS = EcTransferParams("offer", PRODUCER, "mm", 3, 8, "float32", (0, 1), (1, 1), 7)
BASE = WorkerInfo("store", "a" * 32, "kv_store", "", "m", IDENTITY, AgentInfo("store", "a" * 32, 0, (), ()))


class Opener:
    """Memory whose pulls never end; none for embeddings when there is no room."""

    def __init__(self, room: int = 4) -> None:
        self.room = room
        self.asked: list[RowFormat] = []
        self.pulls: list[Pull] = []
        self.tier = DictTier()
        self.clock = ManualClock()
        self.lower, self.reactor = below(self.clock, self.tier)
        self.service = StoreService(BASE, lambda identity, layout: identity.model == "m", self, self.lower)

    def kv(self, identity: IdentityKey, layout: LayoutSpec) -> KvStore:
        raise AssertionError("no blocks here")

    def embeddings(self, identity: IdentityKey, rows: RowFormat) -> EmbeddingStore | None:
        self.asked.append(rows)
        if not self.room:
            return None
        pulls = Pulls("ec", lambda outcome: None)
        pulls.bind(self)
        arena = Arena.create("ec", (self.room,), (rows.extent_bytes,), "a" * 32)
        return EmbeddingStore(
            identity,
            rows,
            arena,
            self.agent,
            pulls,
            self.lower,
            self.clock,
            CountingEntropy(),
            Limits("lru", 1.0, 10),
        )

    def submit(self, pull: Pull) -> None:
        self.pulls.append(pull)

    def agent(self) -> AgentInfo:
        return BASE.agent

    def set_epoch(self, epoch: int) -> None: ...

    def close(self) -> None: ...


async def test_a_look_up_makes_no_memory_while_nothing_can_be_found() -> None:
    opener = Opener()
    assert await opener.service.lookup_embedding(IDENTITY, KEY, 2) == MISS
    assert opener.asked == [] and opener.service.status().num_blocks == 0
    opener.tier.records[b"k" * 32] = (b"h", b"p")
    assert await opener.service.lookup_embedding(IDENTITY, KEY, 2) == MISS
    assert opener.asked == [RowFormat(2, 8, "float32")] and opener.service.status().num_blocks == 4


async def test_the_first_decides_how_rows_lie_and_whose_they_are() -> None:
    opener = Opener()
    opener.tier.records[b"k" * 32] = (b"h", b"p")
    await opener.service.lookup_embedding(IDENTITY, KEY, 2)
    for identity, key, rows in (
        (IDENTITY, KEY, 3),
        (IDENTITY, msgspec.structs.replace(KEY, row_bytes=4), 2),
        (msgspec.structs.replace(IDENTITY, numerics="other"), KEY, 2),
    ):
        assert await opener.service.lookup_embedding(identity, key, rows) == MISS
    assert len(opener.asked) == 1
    stranger = msgspec.structs.replace(IDENTITY, numerics="other")
    assert not await opener.service.offer_embedding(stranger, KEY, ROWS)
    assert opener.pulls == []


@pytest.mark.parametrize(
    "producer",
    [
        AgentInfo("encoder", "b" * 32, 1, (), ()),
        msgspec.structs.replace(PRODUCER, regions=(plan_region("ec", (8,), (4,)),)),
        msgspec.structs.replace(
            PRODUCER, regions=(msgspec.structs.replace(PRODUCER.regions[0], extent_bytes=()),)
        ),
    ],
)
async def test_an_offer_without_sense_makes_no_memory(producer: AgentInfo) -> None:
    opener = Opener()
    params = msgspec.structs.replace(ROWS, producer=producer)
    assert not await opener.service.offer_embedding(IDENTITY, KEY, params)
    other = msgspec.structs.replace(IDENTITY, model="other")
    assert not await opener.service.offer_embedding(other, KEY, ROWS)
    assert opener.asked == []


async def test_without_room_nothing_is_kept() -> None:
    opener = Opener(room=0)
    assert not await opener.service.offer_embedding(IDENTITY, KEY, ROWS)
    opener.service.release(["unknown"])
