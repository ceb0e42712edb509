"""What only Redis can do to us: hold rubbish, be slow, be gone."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from shared.registry.base import RegistryUnavailable
from shared.registry.redis import CALL_TIMEOUT_S, MAX_VALUE_BYTES, RedisRegistry
from tests.contract.registry.harness import RedisHarness, RedisServer, redis_server
from tests.unit.rpc.samples import info

SOUND = msgspec.msgpack.encode(info("bad"))


@pytest.fixture
async def registry(clean_redis: RedisServer) -> AsyncIterator[RedisRegistry]:
    opened = RedisHarness(clean_redis.url).open()
    yield opened
    await opened.close()


@pytest.mark.parametrize(
    "value",
    [
        b"not msgpack",
        b"\xc1",
        b"\x91" * 100_000,
        SOUND[:-1],
        SOUND + b"x" * MAX_VALUE_BYTES,
        msgspec.msgpack.encode(["a", "list"]),
        msgspec.msgpack.encode({"worker_id": "bad"}),
        msgspec.msgpack.encode(info("somebody else")),
        msgspec.msgpack.encode(msgspec.structs.replace(info("bad"), kind="root")),
        msgspec.msgpack.encode(msgspec.structs.replace(info("bad"), incarnation="")),
        msgspec.msgpack.encode({**msgspec.to_builtins(info("bad")), "block_size": "16"}),
    ],
)
async def test_a_poisoned_entry_is_a_miss(registry: RedisRegistry, value: bytes) -> None:
    await registry.announce(info("bad"))
    await registry.announce(info("good"))
    await registry._redis.set("test:worker:bad", value)
    assert await registry.workers() == [info("good")]


async def test_an_entry_of_another_type_is_a_miss(registry: RedisRegistry) -> None:
    await registry.announce(info("bad"))
    await registry.announce(info("good"))
    await registry._redis.delete("test:worker:bad")
    await registry._redis.lpush("test:worker:bad", "x")
    assert await registry.workers() == [info("good")]


async def test_a_malformed_worker_id_is_skipped(registry: RedisRegistry) -> None:
    await registry.announce(info("good"))
    await registry._redis.sadd("test:workers", b"\xff\xfe")
    assert await registry.workers() == [info("good")]


@pytest.mark.parametrize("key", ["test:workers", "test:epoch:a"])
async def test_a_poisoned_index_or_counter_is_no_news(registry: RedisRegistry, key: str) -> None:
    await registry._redis.hset(key, "x", "y")
    with pytest.raises(RegistryUnavailable):
        await registry.announce(info("a"))


async def test_expired_ids_leave_the_index(registry: RedisRegistry, clean_redis: RedisServer) -> None:
    await registry.announce(info("a"))
    await RedisHarness(clean_redis.url).expire()
    assert await registry._redis.smembers("test:workers") == {b"a"}
    await registry.workers()
    assert await registry._redis.smembers("test:workers") == set()


async def test_a_flushed_redis_is_rebuilt_by_announcing(registry: RedisRegistry) -> None:
    await registry.announce(info("a", "i0"))
    await registry.announce(info("a", "i1"))
    await registry._redis.flushall()
    assert await registry.announce(info("a", "i1", epoch=2)) == 2
    assert await registry.workers() == [info("a", "i1", epoch=2)]


async def test_a_frozen_redis_is_no_news_and_serves_again_when_thawed(clean_redis: RedisServer) -> None:
    registry = RedisHarness(clean_redis.url).open(timeout_s=CALL_TIMEOUT_S)
    clean_redis.freeze()
    try:
        for call in (registry.workers(), registry.announce(info("a")), registry.withdraw("a", "i0")):
            with pytest.raises(RegistryUnavailable):
                await call
    finally:
        clean_redis.thaw()
    await registry.close()
    patient = RedisHarness(clean_redis.url).open()
    await patient.announce(info("a"))
    assert await patient.workers() == [info("a")]
    await patient.close()


@pytest.mark.usefixtures("redis")
async def test_a_dead_redis_is_no_news() -> None:
    with redis_server() as server:
        registry = RedisHarness(server.url).open()
        await registry.announce(info("a"))
    with pytest.raises(RegistryUnavailable):
        await registry.workers()
    with pytest.raises(RegistryUnavailable):
        await registry.announce(info("a"))
    await registry.close()


def test_a_malformed_url_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="scheme"):
        RedisRegistry("http://localhost", 5.0)
