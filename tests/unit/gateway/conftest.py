"""A gateway over a scripted service, behind a real HTTP server on a port of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio

from services.router.gateway.limits import GatewayLimits
from services.router.gateway.server import GatewayServer
from shared.clock import CountingEntropy
from tests.unit.gateway.scripted import ScriptedService


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService()


@pytest.fixture
def limits() -> GatewayLimits:
    return GatewayLimits(max_body=64 << 10, body_timeout_s=0.3, stall_s=0.1)


@pytest_asyncio.fixture
async def address(service: ScriptedService, limits: GatewayLimits) -> AsyncIterator[tuple[str, int]]:
    """Host and port of a running gateway."""
    server = GatewayServer(service, limits, entropy=CountingEntropy())
    yield "127.0.0.1", server.start("127.0.0.1", 0)
    await server.stop()


@pytest_asyncio.fixture
async def client(address: tuple[str, int]) -> AsyncIterator[openai.AsyncOpenAI]:
    """The public client, which tries once only."""
    base_url = f"http://{address[0]}:{address[1]}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client
