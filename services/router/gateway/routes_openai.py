"""The OpenAI routes: owns paths and the way from a body to an answer; not the forms of either."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from services.router.gateway.body import parsed, read_body
from services.router.gateway.calls import TokenNames, disconnected, generate_all, run_unless
from services.router.gateway.errors import refusals_counted
from services.router.gateway.limits import GatewayLimits
from services.router.gateway.stream import StreamResponse
from shared.api.openai import ApiCall, CallLabels, model_name, parse_chat, parse_completion
from shared.api.responses import AnswerForm, ChatCollector, CompletionCollector, ResponseCollector
from shared.api.sse import ChatChunks, ChunkWriter, CompletionChunks
from shared.api.strict_json import parse_object
from shared.multimodal.image import ImageReader
from shared.types.bounds import unknown_model
from shared.types.inference import InferenceService, ModelCard

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_CLIENT_GONE = 499


class OpenAIRoutes:
    """Handlers over one service."""

    def __init__(self, service: InferenceService, limits: GatewayLimits) -> None:
        self._service, self._limits = service, limits
        self._names: dict[str, TokenNames] = {}

    def router(self) -> APIRouter:
        """The routes of these handlers."""
        router = APIRouter()
        router.add_api_route("/v1/chat/completions", self.chat, methods=["POST"], response_model=None)
        router.add_api_route("/v1/completions", self.completions, methods=["POST"], response_model=None)
        reading = ["GET", "HEAD"]
        router.add_api_route("/v1/models", self.models, methods=reading, response_model=None)
        router.add_api_route("/v1/models/{name:path}", self.model, methods=reading, response_model=None)
        return router

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions"""

        def form(fields: dict[str, Any], card: ModelCard, labels: CallLabels) -> ApiCall:
            return parse_chat(fields, card, ImageReader(self._limits.images), labels)

        model, call = await self._call(request, form)
        return await self._answer(request, model, call, ChatChunks, ChatCollector)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions"""
        model, call = await self._call(request, parse_completion)
        return await self._answer(request, model, call, CompletionChunks, CompletionCollector)

    async def _call(
        self, request: Request, form: Callable[[dict[str, Any], ModelCard, CallLabels], ApiCall]
    ) -> tuple[str, ApiCall]:
        """The model and what is asked of it."""

        def parse(body: bytes) -> tuple[str, ApiCall]:
            fields = parse_object(body)
            card = _card_of(cards, model_name(fields))
            return card.name, form(fields, card, labels)

        labels = _labels(request)
        with refusals_counted():
            body = await read_body(request, self._limits)
            cards = await self._service.models()
            return await parsed(body, parse)

    async def models(self) -> Response:
        """GET /v1/models"""
        cards = await self._service.models()
        return JSONResponse({"object": "list", "data": [_card_json(card) for card in cards]})

    async def model(self, name: str) -> Response:
        """GET /v1/models/{name}"""
        return JSONResponse(_card_json(_card_of(await self._service.models(), name)))

    async def _answer(
        self,
        request: Request,
        model: str,
        call: ApiCall,
        chunks: type[ChunkWriter],
        collector: type[ResponseCollector],
    ) -> Response:
        names = self._names.setdefault(model, TokenNames(self._service, model))
        form = AnswerForm(model, call.n, call.options, names)
        if call.options.stream:
            return StreamResponse(self._service, call, chunks(form), names, self._limits.stall_s)
        work = self._collect(call, collector(form), names)
        body = await run_unless(disconnected(request.receive), work)
        if body is None:
            return Response(status_code=_CLIENT_GONE)
        return Response(body, media_type="application/json")

    async def _collect(self, call: ApiCall, collector: ResponseCollector, names: TokenNames) -> bytes:
        async with aclosing(generate_all(self._service, call.requests)) as batches:
            async for prompt, outputs in batches:
                if call.options.logprobs:
                    await names.load(outputs)
                collector.add(prompt, outputs)
        return collector.finish()


def _card_of(cards: Sequence[ModelCard], name: str) -> ModelCard:
    for card in cards:
        if card.name == name:
            return card
    raise unknown_model(card.name for card in cards)


def _labels(request: Request) -> CallLabels:
    traceparent = request.headers.get("traceparent", "")
    return CallLabels(
        request_id=request.state.request_id,
        traceparent=traceparent if _TRACEPARENT.fullmatch(traceparent) else "",
    )


def _card_json(card: ModelCard) -> dict[str, object]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "triptych",
        "root": card.name,
        "parent": None,
        "max_model_len": card.max_model_len,
    }
