"""A gateway over a scripted service, behind a real HTTP server on a port of its own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import openai
import pytest_asyncio
import uvicorn

from services.router.gateway.app import create_app
from services.router.gateway.limits import GatewayLimits
from services.router.gateway.protocol import GatewayProtocol
from shared.clock import CountingEntropy
from tests.unit.gateway.scripted import ScriptedService

LIMITS = GatewayLimits(max_body=64 << 10, body_timeout_s=0.3, stall_s=0.1)


@pytest_asyncio.fixture
async def service() -> ScriptedService:
    return ScriptedService()


@pytest_asyncio.fixture
async def address(service: ScriptedService) -> AsyncIterator[tuple[str, int]]:
    """Host and port of a running gateway."""
    config = uvicorn.Config(
        create_app(service, LIMITS, entropy=CountingEntropy()),
        http=GatewayProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
    )
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    yield listener.getsockname()
    server.should_exit = server.force_exit = True
    await serving
    listener.close()


@pytest_asyncio.fixture
async def client(address: tuple[str, int]) -> AsyncIterator[openai.AsyncOpenAI]:
    """The public client, which tries once only."""
    base_url = f"http://{address[0]}:{address[1]}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client
