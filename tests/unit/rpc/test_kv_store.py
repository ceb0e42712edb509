"""The KV store's service over a real connection."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from shared.errors import InvalidRequest, PeerLost, WorkerLost
from shared.rpc.client import open_channel, typed_errors
from shared.rpc.kv_store import KvStoreServicer, KvStoreStub
from shared.types.identity import IdentityKey, LayoutSpec
from shared.types.kv import KVGroupSpec
from shared.types.store import BlockKey, EmbeddingHit, EmbeddingKey, OfferedBlock, StoreHit
from shared.types.transfer import AgentInfo, BlockRef, EcTransferParams, KvTransferParams
from shared.types.worker import WorkerInfo, WorkerStatus
from tests.unit.rpc.samples import IDENTITY, INFO, serving
from triptych.v1 import kv_store_pb2 as pb
from triptych.v1 import kv_store_pb2_grpc

LAYOUT = LayoutSpec((KVGroupSpec(2, 1, 4, "float32"),), 4)
KEY = BlockKey(0, b"h" * 32, b"p" * 32, (1, 2, 3, 4), (("m", -2),))
BLOCK = OfferedBlock(KEY, BlockRef(3, 7, (1 << 63, 5)), "tenant")
EMBEDDING = EmbeddingKey(b"m" * 32, "options", "processor", b"s" * 32, 5, 16, "float32")
ROWS = EcTransferParams("h", INFO.agent, "mm", 5, 16, "float32", (4, 2), (7, 1 << 63), 1 << 63)


class Store:
    """A KvStorePort that answers with what it was given."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.error: Exception | None = None

    async def offer(self, identity: IdentityKey, producer: AgentInfo, blocks: Sequence[OfferedBlock]) -> int:
        if self.error is not None:
            raise self.error
        self.calls.append((identity, producer, list(blocks)))
        return len(blocks)

    async def lookup(
        self, identity: IdentityKey, layout: LayoutSpec, blocks: Sequence[BlockKey], tenant: str = ""
    ) -> StoreHit:
        self.calls.append((identity, layout, list(blocks), tenant))
        if not blocks:
            return StoreHit()
        run = KvTransferParams("lease", INFO.agent, 0, 0, (BLOCK.ref,))
        return StoreHit("lease", 30.0, 1, (run,))

    async def offer_embedding(
        self, identity: IdentityKey, key: EmbeddingKey, params: EcTransferParams
    ) -> bool:
        self.calls.append((identity, key, params))
        return key == EMBEDDING

    async def lookup_embedding(
        self, identity: IdentityKey, key: EmbeddingKey, rows_per_block: int
    ) -> EmbeddingHit:
        self.calls.append((identity, key, rows_per_block))
        return EmbeddingHit("lease", 30.0, ROWS) if key == EMBEDDING else EmbeddingHit()

    def release(self, lease_ids: Sequence[str]) -> None:
        self.calls.append(list(lease_ids))

    def info(self) -> WorkerInfo:
        return INFO

    def status(self) -> WorkerStatus:
        return WorkerStatus("i0", num_blocks=9)


@asynccontextmanager
async def store_at(port: Store) -> AsyncIterator[KvStoreStub]:
    async with serving(KvStoreServicer(port)) as address:
        stub = KvStoreStub(address)
        yield stub
        await stub.close()


async def test_every_call_carries_its_records_both_ways() -> None:
    port = Store()
    async with store_at(port) as stub:
        assert await stub.offer(IDENTITY, INFO.agent, [BLOCK, BLOCK]) == 2
        hit = await stub.lookup(IDENTITY, LAYOUT, [KEY], "tenant")
        await stub.release(["lease"])
        assert await stub.status() == (INFO, WorkerStatus("i0", num_blocks=9))
    assert hit == StoreHit("lease", 30.0, 1, (KvTransferParams("lease", INFO.agent, 0, 0, (BLOCK.ref,)),))
    asked = (IDENTITY, LAYOUT, [KEY], "tenant")
    assert port.calls == [(IDENTITY, INFO.agent, [BLOCK, BLOCK]), asked, ["lease"]]


async def test_embeddings_carry_their_records_both_ways() -> None:
    port = Store()
    other = msgspec.structs.replace(EMBEDDING, num_rows=6)
    async with store_at(port) as stub:
        assert await stub.offer_embedding(IDENTITY, EMBEDDING, ROWS)
        assert not await stub.offer_embedding(IDENTITY, other, ROWS)
        assert await stub.lookup_embedding(IDENTITY, EMBEDDING, 3) == EmbeddingHit("lease", 30.0, ROWS)
        assert await stub.lookup_embedding(IDENTITY, other, 3) == EmbeddingHit()
    assert port.calls == [
        (IDENTITY, EMBEDDING, ROWS),
        (IDENTITY, other, ROWS),
        (IDENTITY, EMBEDDING, 3),
        (IDENTITY, other, 3),
    ]


async def test_a_miss_is_an_empty_hit() -> None:
    async with store_at(Store()) as stub:
        assert await stub.lookup(IDENTITY, LAYOUT, []) == StoreHit()


async def test_errors_of_the_store_keep_their_type() -> None:
    port = Store()
    port.error = PeerLost("the producer is gone")
    async with store_at(port) as stub:
        with pytest.raises(PeerLost):
            await stub.offer(IDENTITY, INFO.agent, [])


async def test_a_store_that_is_not_there_is_a_typed_error(free_port: int) -> None:
    stub = KvStoreStub(f"127.0.0.1:{free_port}")
    with pytest.raises(WorkerLost):
        await stub.lookup(IDENTITY, LAYOUT, [KEY], timeout_s=5)
    await stub.close()


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("Offer", pb.OfferRequest()),
        ("Lookup", pb.LookupRequest()),
        ("Lookup", pb.LookupRequest(identity={}, layout={})),
        ("Release", pb.ReleaseRequest(lease_ids=["x" * 1000])),
        ("OfferEmbedding", pb.OfferEmbeddingRequest(identity={}, key={})),
        ("LookupEmbedding", pb.LookupEmbeddingRequest(identity={}, rows_per_block=1)),
        ("LookupEmbedding", pb.LookupEmbeddingRequest(identity={}, key={}, rows_per_block=1)),
        (
            "LookupEmbedding",
            pb.LookupEmbeddingRequest(
                identity={},
                key={"media_hash": b"m", "salt_digest": b"s", "num_rows": 1, "row_bytes": 1, "dtype": "f"},
            ),
        ),
        (
            "Offer",
            pb.OfferRequest(identity={}, producer={"worker_id": "w", "incarnation": "i"}, blocks=[{}]),
        ),
    ],
)
async def test_malformed_calls_are_refused(method: str, request_: Any) -> None:
    async with serving(KvStoreServicer(Store())) as address, open_channel(address) as channel:
        with pytest.raises(InvalidRequest), typed_errors():
            await getattr(kv_store_pb2_grpc.KvStoreServiceStub(channel), method)(request_)
