"""Media upload over a real connection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from shared.errors import InvalidRequest, Overloaded, RequestTooLarge
from shared.rpc.client import open_channel, typed_errors
from shared.rpc.worker_client import WorkerClient
from shared.rpc.worker_stream import MEDIA_CHUNK_BYTES, WorkerServicer
from tests.unit.rpc.samples import EchoWorker, serving
from triptych.v1 import worker_pb2 as pb
from triptych.v1 import worker_pb2_grpc


@asynccontextmanager
async def encoder(worker: EchoWorker, **limits: int) -> AsyncIterator[WorkerClient]:
    async with serving(WorkerServicer(worker, **limits)) as address:
        client = WorkerClient(address, "router", 1)
        yield client
        await client.close()


@pytest.mark.parametrize("nbytes", [0, 1, MEDIA_CHUNK_BYTES, MEDIA_CHUNK_BYTES + 1, 5_000_000])
async def test_media_arrives_whole(nbytes: int) -> None:
    worker = EchoWorker()
    data = (bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]
    async with encoder(worker) as client:
        await client.put_media("hash", data)
    assert worker.media == {"hash": data}


async def test_media_over_the_limit_is_refused() -> None:
    worker = EchoWorker()
    async with encoder(worker, max_media_bytes=1000) as client:
        await client.put_media("small", b"x" * 1000)
        with pytest.raises(RequestTooLarge):
            await client.put_media("large", b"x" * 1001)
    assert set(worker.media) == {"small"}


async def test_the_worker_may_refuse() -> None:
    worker = EchoWorker()
    worker.refuse_media = Overloaded("full")
    async with encoder(worker) as client:
        with pytest.raises(Overloaded):
            await client.put_media("hash", b"x")


def header(nbytes: int, mm_hash: str = "h") -> pb.PutMediaRequest:
    return pb.PutMediaRequest(header=pb.MediaHeader(mm_hash=mm_hash, nbytes=nbytes))


def chunk(nbytes: int) -> pb.PutMediaRequest:
    return pb.PutMediaRequest(chunk=b"x" * nbytes)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [chunk(1)],
        [pb.PutMediaRequest()],
        [header(0, "")],
        [header(2), chunk(1)],
        [header(2), chunk(1), chunk(2)],
        [header(2), header(2)],
        [header(MEDIA_CHUNK_BYTES + 1), chunk(MEDIA_CHUNK_BYTES + 1)],
    ],
)
async def test_malformed_uploads_are_refused(messages: list[pb.PutMediaRequest]) -> None:
    worker = EchoWorker()
    async with serving(WorkerServicer(worker)) as address, open_channel(address) as channel:
        with pytest.raises(InvalidRequest), typed_errors():
            await worker_pb2_grpc.WorkerServiceStub(channel).PutMedia(iter(messages))
    assert worker.media == {}
