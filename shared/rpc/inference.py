"""The public inference interface over gRPC, both ends (``inference.proto``).

``InferenceClient`` is an InferenceService, so a gateway deployed apart from its router sees no
difference.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from shared.errors import TriptychError
from shared.rpc import checks
from shared.rpc.client import open_channel, typed_errors
from shared.rpc.convert_inference import (
    card_from_wire,
    card_to_wire,
    inference_from_wire,
    inference_to_wire,
    output_from_wire,
    output_to_wire,
)
from shared.telemetry import metrics
from shared.telemetry.outcome import outcome_of
from shared.types.inference import InferenceRequest, InferenceService, ModelCard, Output
from triptych.v1 import inference_pb2 as pb
from triptych.v1 import inference_pb2_grpc

CALL_TIMEOUT_S = 5.0
#: What a client sends at most; how much a server takes is its configuration's business.
MAX_REQUEST_BYTES = 64 << 20


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """An InferenceService on the wire."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service

    def add_to(self, server: grpc.aio.Server) -> None:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, server)

    async def Generate(
        self, request: pb.GenerateRequest, context: object
    ) -> AsyncIterator[pb.GenerateResponse]:
        batches = self._service.generate(_read(request))
        try:
            async for outputs in batches:
                yield pb.GenerateResponse(outputs=[output_to_wire(output) for output in outputs])
        finally:
            # Closing the iterator is what aborts the request; a plain iterator has nothing to close.
            close = getattr(batches, "aclose", None)
            if close is not None:
                await close()

    async def ListModels(self, request: pb.ListModelsRequest, context: object) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[card_to_wire(card) for card in await self._service.models()])

    async def TokenText(self, request: pb.TokenTextRequest, context: object) -> pb.TokenTextResponse:
        token_ids = checks.token_ids("token_ids", request.token_ids)
        return pb.TokenTextResponse(texts=await self._service.token_text(request.model, token_ids))

    async def Ready(self, request: pb.ReadyRequest, context: object) -> pb.ReadyResponse:
        return pb.ReadyResponse(ready=await self._service.ready())


def _read(wire: pb.GenerateRequest) -> InferenceRequest:
    """As ``inference_from_wire``; a refusal is counted, since the service never sees that request."""
    try:
        return inference_from_wire(wire)
    except TriptychError as error:
        metrics.REQUESTS.labels(outcome_of(error)).inc()
        raise


class InferenceClient:
    """The InferenceService behind a router's gRPC address; event loop only."""

    def __init__(self, address: str, *, max_message_bytes: int = MAX_REQUEST_BYTES) -> None:
        self._channel = open_channel(address, max_message_bytes=max_message_bytes)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def generate(self, request: InferenceRequest) -> AsyncIterator[list[Output]]:
        with typed_errors():
            call = self._stub.Generate(inference_to_wire(request))
            try:
                async for reply in call:
                    yield [output_from_wire(output) for output in reply.outputs]
            finally:
                call.cancel()

    async def models(self) -> list[ModelCard]:
        with typed_errors():
            reply = await self._stub.ListModels(pb.ListModelsRequest(), timeout=CALL_TIMEOUT_S)
        return [card_from_wire(card) for card in reply.models]

    async def token_text(self, model: str, token_ids: tuple[int, ...]) -> list[bytes]:
        request = pb.TokenTextRequest(model=model, token_ids=token_ids)
        with typed_errors():
            reply = await self._stub.TokenText(request, timeout=CALL_TIMEOUT_S)
        return list(reply.texts)

    async def ready(self) -> bool:
        with typed_errors():
            reply = await self._stub.Ready(pb.ReadyRequest(), timeout=CALL_TIMEOUT_S)
        return reply.ready

    async def close(self) -> None:
        await self._channel.close(None)
