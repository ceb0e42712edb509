"""The HTTP gateway: owns its assembly; talks to nothing but an InferenceService."""

from __future__ import annotations

from importlib import metadata

from fastapi import FastAPI

from services.router.gateway.errors import install_error_handlers
from services.router.gateway.limits import GatewayLimits
from services.router.gateway.middleware import GatewayMiddleware
from services.router.gateway.routes_admin import admin_router
from services.router.gateway.routes_openai import OpenAIRoutes
from shared.clock import Entropy, SystemEntropy
from shared.types.inference import InferenceService


def create_app(
    service: InferenceService,
    limits: GatewayLimits | None = None,
    *,
    entropy: Entropy | None = None,
) -> FastAPI:
    """The ASGI application over ``service``. It starts and stops nothing of its own."""
    limits = limits or GatewayLimits()
    app = FastAPI(title="Triptych", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_middleware(GatewayMiddleware, entropy=entropy or SystemEntropy())
    install_error_handlers(app)
    app.include_router(OpenAIRoutes(service, limits).router())
    app.include_router(admin_router(service, _version()))
    return app


def _version() -> str:
    try:
        return metadata.version("triptych")
    except metadata.PackageNotFoundError:
        return "unknown"
