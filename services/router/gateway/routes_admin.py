"""The routes for operators: owns health and version."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from shared.types.inference import InferenceService


def admin_router(service: InferenceService, version: str) -> APIRouter:
    """/health (200 when every phase of the deployment has a live worker, else 503) and /version, for GET and
    HEAD."""
    router = APIRouter()

    async def health() -> Response:
        if await service.ready():
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unavailable"}, 503, {"retry-after": "1"})

    async def show_version() -> Response:
        return JSONResponse({"version": version})

    router.add_api_route("/health", health, methods=["GET", "HEAD"], response_model=None)
    router.add_api_route("/version", show_version, methods=["GET", "HEAD"], response_model=None)
    return router
