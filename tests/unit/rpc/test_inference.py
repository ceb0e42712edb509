"""The inference interface looks the same in this process and behind gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import msgspec
import pytest

from shared.errors import ContextLengthExceeded, InvalidRequest, WorkerLost
from shared.rpc.client import open_channel, typed_errors
from shared.rpc.inference import InferenceClient, InferenceServicer
from shared.telemetry import metrics
from shared.types.inference import (
    Accepted,
    Delta,
    ImagePart,
    InferenceRequest,
    InferenceService,
    Message,
    ModelCard,
    Output,
    TextPart,
    Usage,
)
from shared.types.request import SamplingParams, TokenLogprobs
from tests.unit.rpc.samples import serving
from triptych.v1 import inference_pb2 as pb
from triptych.v1 import inference_pb2_grpc

REQUEST = InferenceRequest(
    "m",
    SamplingParams(max_tokens=2, logprobs=1),
    messages=(Message("user", (TextPart("what?"), ImagePart(b"\x89PNG"))),),
    n=2,
    stop=("\n",),
)
BATCHES: list[list[Output]] = [
    [Accepted("id", (1, 2), 5, 1_700_000_000)],
    [Delta(0, "a", (7,), (TokenLogprobs(-0.5, 0, (7,), (-0.5,)),)), Delta(1, "b", (8,))],
    [Delta(0, "", finish_reason="length"), Delta(1, "", (9,), finish_reason="stop", stop_reason="\n")],
    [Usage(2, 3)],
]


class Scripted:
    """An InferenceService that answers ``BATCHES``; ``hold`` stops it after the first."""

    def __init__(self) -> None:
        self.seen: list[InferenceRequest] = []
        self.error: Exception | None = None
        self.hold = False
        self.closed = asyncio.Event()

    async def generate(self, request: InferenceRequest) -> AsyncIterator[list[Output]]:
        self.seen.append(request)
        try:
            for batch in BATCHES:
                yield batch
                if self.error is not None:
                    raise self.error
                if self.hold:
                    await asyncio.Event().wait()
        finally:
            self.closed.set()

    async def models(self) -> list[ModelCard]:
        return [ModelCard("m", 2048, 49280, 1_700_000_000, vision=True)]

    async def token_text(self, model: str, token_ids: tuple[int, ...]) -> list[bytes]:
        return [f"{model}{token}".encode() for token in token_ids]

    async def ready(self) -> bool:
        return True


@asynccontextmanager
async def remote(service: Scripted) -> AsyncIterator[InferenceClient]:
    async with serving(InferenceServicer(service)) as address:
        client = InferenceClient(address)
        yield client
        await client.close()


async def test_request_and_outputs_pass_unchanged() -> None:
    service = Scripted()
    async with remote(service) as client:
        as_service: InferenceService = client
        assert [batch async for batch in as_service.generate(REQUEST)] == BATCHES
        assert await client.models() == await service.models()
        assert await client.token_text("m", (1, 2)) == [b"m1", b"m2"]
        assert await client.ready()
    assert service.seen == [REQUEST]


async def test_closing_the_iterator_closes_the_service_s() -> None:
    service = Scripted()
    service.hold = True
    async with remote(service) as client:
        async with aclosing(client.generate(REQUEST)) as batches:
            assert await anext(batches) == BATCHES[0]
            assert not service.closed.is_set()
        async with asyncio.timeout(10):
            await service.closed.wait()


async def test_a_vanished_client_closes_the_service_s_iterator() -> None:
    service = Scripted()
    service.hold = True
    async with serving(InferenceServicer(service)) as address:
        client = InferenceClient(address)
        batches = client.generate(REQUEST)
        await anext(batches)
        await client.close()
        async with asyncio.timeout(10):
            await service.closed.wait()
        with pytest.raises((asyncio.CancelledError, StopAsyncIteration)):
            await anext(batches)


@pytest.mark.parametrize("error", [ContextLengthExceeded("too long", param="messages"), WorkerLost("gone")])
async def test_errors_in_mid_stream_keep_their_type(error: Exception) -> None:
    service = Scripted()
    service.error = error
    async with remote(service) as client:
        with pytest.raises(type(error)) as raised:
            async for batch in client.generate(REQUEST):
                assert batch == BATCHES[0]
    assert raised.value.param == error.param  # type: ignore[attr-defined]


async def test_a_request_that_fits_no_wire_is_refused_here() -> None:
    async with remote(Scripted()) as client:
        with pytest.raises(InvalidRequest):
            await anext(client.generate(InferenceRequest("m", SamplingParams(max_tokens=-1), prompt="x")))


async def test_pictures_of_many_megabytes_arrive() -> None:
    service = Scripted()
    picture = ImagePart(bytes(6 << 20))
    request = msgspec.structs.replace(REQUEST, messages=(Message("user", (picture, picture)),))
    async with serving(InferenceServicer(service), max_message_bytes=16 << 20) as address:
        client = InferenceClient(address)
        assert [batch async for batch in client.generate(request)] == BATCHES
        await client.close()
    assert service.seen == [request]


def refusals() -> float:
    return metrics.REGISTRY.get_sample_value("triptych_requests_total", {"outcome": "invalid"}) or 0.0


async def test_a_malformed_request_is_refused_there() -> None:
    service = Scripted()
    refused_before = refusals()
    async with serving(InferenceServicer(service)) as address, open_channel(address) as channel:
        with pytest.raises(InvalidRequest) as refused, typed_errors():
            await (
                inference_pb2_grpc.InferenceServiceStub(channel)
                .Generate(pb.GenerateRequest(model="m"))
                .read()
            )
    assert refused.value.param == "input"
    assert service.seen == []
    assert refusals() == refused_before + 1
