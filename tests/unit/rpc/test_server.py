"""The server's rules, seen through a real connection: typed errors, caps, health, ports."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.errors import (
    ConfigError,
    InternalError,
    InvalidRequest,
    RequestTooLarge,
    TriptychError,
    UnsupportedMedia,
    WorkerLost,
    all_errors,
)
from shared.rpc.client import open_channel, typed_errors
from shared.rpc.server import RpcServer
from tests.unit.rpc.samples import serving
from triptych.v1 import inference_pb2 as pb
from triptych.v1 import inference_pb2_grpc


class Failing(inference_pb2_grpc.InferenceServiceServicer):
    """Raises what it is told to."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def add_to(self, server: grpc.aio.Server) -> None:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, server)

    async def Ready(self, request: pb.ReadyRequest, context: object) -> pb.ReadyResponse:
        raise self.error

    async def Generate(
        self, request: pb.GenerateRequest, context: object
    ) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse()
        raise self.error


async def raised(address: str) -> tuple[TriptychError, TriptychError]:
    """What a client sees of a unary call and in the middle of a stream."""
    async with open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(TriptychError) as unary, typed_errors():
            await stub.Ready(pb.ReadyRequest())
        with pytest.raises(TriptychError) as streamed, typed_errors():
            async for _ in stub.Generate(pb.GenerateRequest()):
                pass
    return unary.value, streamed.value


async def test_every_error_of_the_tree_arrives_as_itself() -> None:
    servicer = Failing(InternalError("x"))
    async with serving(servicer) as address:
        for cls in all_errors():
            servicer.error = cls("what happened: ä, 100%", param="messages[0].content")
            for error in await raised(address):
                assert type(error) is cls
                assert (error.message, error.param, error.code) == (
                    "what happened: ä, 100%",
                    "messages[0].content",
                    cls.code,
                )


async def test_a_code_of_its_own_and_no_param_arrive() -> None:
    async with serving(Failing(UnsupportedMedia("no", code="of_its_own"))) as address:
        for error in await raised(address):
            assert (type(error), error.code, error.param) == (UnsupportedMedia, "of_its_own", None)


async def test_texts_that_fit_no_header_arrive_cut_and_whole() -> None:
    async with serving(Failing(InvalidRequest("m" * 5000, param="pä\r\nram%" + "x" * 500))) as address:
        for error in await raised(address):
            assert error.message == "m" * 1000
            assert (
                error.param is not None and error.param.startswith("pä\r\nram%") and len(error.param) == 200
            )


async def test_an_unknown_exception_tells_the_client_nothing_and_the_log_everything(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(Failing(KeyError("/secret/path"))) as address:
        for error in await raised(address):
            assert (type(error), error.message) == (InternalError, "internal error")
    assert [r.levelno for r in caplog.records if r.name == "shared.rpc.server"] == [logging.ERROR] * 2


async def test_malformed_bytes_are_an_invalid_request() -> None:
    async with serving(Failing(InternalError("never reached"))) as address, open_channel(address) as channel:
        call = channel.unary_unary("/triptych.v1.InferenceService/Ready")
        with pytest.raises(InvalidRequest), typed_errors():
            await call(b"\xff\xff\xff")
        stream = channel.unary_stream("/triptych.v1.InferenceService/Generate")(b"\x0a\xff")
        with pytest.raises(InvalidRequest), typed_errors():
            await stream.read()


async def test_a_message_over_the_cap_is_refused() -> None:
    small = serving(Failing(InternalError("x")), max_message_bytes=1 << 16)
    async with small as address, open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(RequestTooLarge), typed_errors():
            await stub.TokenText(pb.TokenTextRequest(model="m" * (1 << 18)))


async def test_a_message_not_far_over_the_cap_is_refused_in_our_own_words() -> None:
    small = serving(Failing(InternalError("reached")), max_message_bytes=1 << 16)
    async with small as address, open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(pb.GenerateRequest(prompt="x" * (1 << 16)))
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call.read()
        metadata = dict(failure.value.trailing_metadata() or ())
        assert metadata["triptych-code"] == "request_too_large"
        assert str(1 << 16) in (failure.value.details() or "")
        with pytest.raises(InternalError, match="reached"), typed_errors():
            async for _ in stub.Generate(pb.GenerateRequest(prompt="x" * ((1 << 16) - 100))):
                pass


async def test_a_peer_that_is_not_there_is_lost_and_unnamed(free_port: int) -> None:
    async with open_channel(f"127.0.0.1:{free_port}") as channel:
        with pytest.raises(WorkerLost) as lost, typed_errors():
            await inference_pb2_grpc.InferenceServiceStub(channel).Ready(pb.ReadyRequest())
    assert str(free_port) not in lost.value.message


async def test_unknown_methods_stay_unimplemented() -> None:
    async with serving(Failing(InternalError("x"))) as address, open_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await channel.unary_unary("/triptych.v1.InferenceService/Nothing")(b"")
    assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_the_health_service_follows_the_server() -> None:
    server = RpcServer()
    port = await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for serving_now in (True, False, True):
            await server.set_serving(serving_now)
            reply = await stub.Check(health_pb2.HealthCheckRequest())
            assert (reply.status == health_pb2.HealthCheckResponse.SERVING) is serving_now
    await server.stop()


async def test_a_taken_port_is_a_config_error() -> None:
    first = RpcServer()
    port = await first.start()
    with pytest.raises(ConfigError):
        await RpcServer(port=port).start()
    await first.stop()


async def test_stop_lets_a_running_call_finish_within_its_grace() -> None:
    entered, leave = asyncio.Event(), asyncio.Event()

    class Slow(Failing):
        async def Ready(self, request: pb.ReadyRequest, context: object) -> pb.ReadyResponse:
            entered.set()
            await leave.wait()
            return pb.ReadyResponse(ready=True)

    server = RpcServer()
    Slow(InternalError("x")).add_to(server.server)
    port = await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Ready(pb.ReadyRequest())
        pending = asyncio.ensure_future(call)
        await entered.wait()
        stopping = asyncio.create_task(server.stop(grace_s=30))
        leave.set()
        assert (await pending).ready
        await stopping
