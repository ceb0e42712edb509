"""A registry in Redis, shared by several routers. Nothing in it is trusted or needed for serving.

Owns its key space: ``P:epoch:W`` (counter), ``P:seen:W:I`` (epoch of one incarnation), ``P:worker:W``
(the entry, expiring), ``P:workers`` (the ids to ask for), for prefix P, worker id W, incarnation I.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from shared.registry.base import Registry, RegistryUnavailable
from shared.telemetry.logs import get_logger
from shared.types.worker import KINDS, WorkerInfo

CALL_TIMEOUT_S = 0.2
MAX_VALUE_BYTES = 256 << 10
MAX_WORKERS = 4096
_SEEN_TTL_S = 7 * 86400
#: Epochs pass through Lua numbers, which are exact up to here.
_MAX_EPOCH = 1 << 53

_ANNOUNCE = """
local epoch = redis.call('GET', KEYS[2])
if not epoch then
  epoch = redis.call('INCR', KEYS[1])
  if tonumber(ARGV[3]) > epoch then
    epoch = ARGV[3]
    redis.call('SET', KEYS[1], epoch)
  end
end
redis.call('SET', KEYS[2], epoch, 'EX', ARGV[4])
if tonumber(epoch) == tonumber(redis.call('GET', KEYS[1])) then
  redis.call('SET', KEYS[3], ARGV[1], 'PX', ARGV[2])
  redis.call('SADD', KEYS[4], ARGV[5])
end
return tonumber(epoch)
"""
_WITHDRAW = """
if redis.call('GET', KEYS[2]) == redis.call('GET', KEYS[1]) then
  redis.call('DEL', KEYS[3])
  redis.call('SREM', KEYS[4], ARGV[1])
end
return 0
"""
log = get_logger(__name__)


class RedisRegistry(Registry):
    """Every call takes at most ``timeout_s``; entries expire by the clock of Redis."""

    def __init__(
        self, url: str, ttl_s: float, *, prefix: str = "triptych", timeout_s: float = CALL_TIMEOUT_S
    ) -> None:
        """Connects on first use. Raises ValueError on a malformed ``url``."""
        self._ttl_ms = max(1, int(ttl_s * 1000))
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._redis: Redis = Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            decode_responses=False,
        )

    async def announce(self, info: WorkerInfo) -> int:
        value = msgspec.msgpack.encode(info)
        floor = min(info.agent.epoch, _MAX_EPOCH - 1)
        args = (value, self._ttl_ms, floor, _SEEN_TTL_S, info.worker_id)
        return int(await self._eval(_ANNOUNCE, self._keys(info.worker_id, info.incarnation), args))

    async def withdraw(self, worker_id: str, incarnation: str) -> None:
        await self._eval(_WITHDRAW, self._keys(worker_id, incarnation), (worker_id,))

    async def workers(self) -> list[WorkerInfo]:
        async with _bounded(self._timeout_s):
            members: Any = await self._redis.srandmember(self._key("workers"), MAX_WORKERS)
            ids = sorted(_texts(members))
            if not ids:
                return []
            pipeline = self._redis.pipeline(transaction=False)
            for worker_id in ids:
                # One byte more than allowed tells an over-long value without fetching all of it.
                pipeline.getrange(self._key("worker", worker_id), 0, MAX_VALUE_BYTES)
            values = await pipeline.execute(raise_on_error=False)
            listed = {key: _decode(key, value) for key, value in zip(ids, values, strict=True)}
            gone = [key for key, value in zip(ids, values, strict=True) if value == b""]
            if gone:
                # One that announces itself meanwhile is back with its next announcement.
                await self._redis.srem(self._key("workers"), *gone)
        return [info for info in listed.values() if info is not None]

    async def close(self) -> None:
        await self._redis.aclose()

    def _key(self, *parts: str) -> str:
        return ":".join((self._prefix, *(quote(part, safe="") for part in parts)))

    def _keys(self, worker_id: str, incarnation: str) -> tuple[str, ...]:
        return (
            self._key("epoch", worker_id),
            self._key("seen", worker_id, incarnation),
            self._key("worker", worker_id),
            self._key("workers"),
        )

    async def _eval(self, script: str, keys: Sequence[str], args: Sequence[str | int | bytes]) -> Any:
        async with _bounded(self._timeout_s):
            return await self._redis.eval(script, len(keys), *keys, *args)


@asynccontextmanager
async def _bounded(timeout_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except (RedisError, OSError, TimeoutError) as error:
        raise RegistryUnavailable(type(error).__name__) from error


def _texts(members: object) -> list[str]:
    found: list[str] = []
    for member in members if isinstance(members, list) else []:
        try:
            found.append(member.decode("utf-8"))
        except (AttributeError, UnicodeDecodeError):
            log.warning("a malformed worker id in the registry is skipped")
    return found


def _decode(worker_id: str, value: object) -> WorkerInfo | None:
    """The entry, or None when it is missing, too large or not what an entry looks like."""
    if not isinstance(value, bytes) or not value:
        return None
    try:
        if len(value) > MAX_VALUE_BYTES:
            raise ValueError("too large")
        info = msgspec.msgpack.decode(value, type=WorkerInfo)
        if info.worker_id != worker_id or info.kind not in KINDS or not info.incarnation or not info.address:
            raise ValueError("contradicts itself")
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        log.warning("a malformed entry in the registry is skipped", reason=type(error).__name__)
        return None
    return info
