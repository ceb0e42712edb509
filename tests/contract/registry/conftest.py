"""Fixtures: each registry in turn; a redis-server where one is installed."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.contract.registry.harness import Harness, MemoryHarness, RedisHarness, RedisServer, redis_server


@pytest.fixture(scope="session")
def redis() -> Iterator[RedisServer]:
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server on PATH (Debian: apt install redis-server)")
    with redis_server() as server:
        yield server


@pytest.fixture
async def clean_redis(redis: RedisServer) -> AsyncIterator[RedisServer]:
    """The shared server, emptied."""
    registry = RedisHarness(redis.url).open()
    await registry._redis.flushall()
    await registry.close()
    yield redis


@pytest.fixture(params=["memory", "redis"])
def harness(request: pytest.FixtureRequest) -> Harness:
    if request.param == "memory":
        return MemoryHarness()
    server: RedisServer = request.getfixturevalue("clean_redis")
    return RedisHarness(server.url)
