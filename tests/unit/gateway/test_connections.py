"""Connections that never become a request, or not in time, or are too many, or end too early."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import closing

import pytest

from services.router.gateway.limits import GatewayLimits
from shared.telemetry import metrics
from tests.unit.gateway.scripted import ScriptedService
from tests.unit.gateway.wire import Address, Reply, exchange, get, post, read_reply

MOST = 3


@pytest.fixture
def limits() -> GatewayLimits:
    return GatewayLimits(header_timeout_s=0.2, body_timeout_s=0.3, max_connections=MOST)


async def dribbled(address: Address, pieces: Callable[[], bytes], first: bytes = b"") -> bytes:
    """All that comes back from a connection on which a piece is sent now and then, until it is closed."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(first)

    async def dribble() -> None:
        while True:
            writer.write(pieces())
            await asyncio.sleep(0.02)

    dribbling = asyncio.create_task(dribble())
    try:
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionResetError:  # it was closed with a piece on its way
        return b""
    finally:
        dribbling.cancel()
        writer.close()


async def test_headers_that_never_end_are_408(address: Address) -> None:
    reader, writer = await asyncio.open_connection(*address)
    with closing(writer):
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        reply = await asyncio.wait_for(read_reply(reader), 10)
        assert (reply.status, reply.error["code"]) == (408, "request_timeout")
        assert reply.headers["connection"] == "close"
        assert await reader.read() == b""


@pytest.mark.parametrize("first", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"])
@pytest.mark.parametrize("piece", [b"X-A: b\r\n", b"\r\n"])
async def test_bytes_now_and_then_do_not_keep_a_connection(
    address: Address, first: bytes, piece: bytes
) -> None:
    """Neither header after header nor empty lines, on a new connection or after a request."""
    head = b"GET /health HTTP/1.1\r\n" if piece.strip() else b""
    data = await dribbled(address, lambda: piece, first + head)
    assert data.count(b"HTTP/1.1 200 ") <= 1


async def test_a_silent_connection_is_closed_without_a_word(address: Address) -> None:
    reader, writer = await asyncio.open_connection(*address)
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()


async def test_a_request_may_take_longer_than_its_headers(address: Address, service: ScriptedService) -> None:
    service.hold = asyncio.Event()
    reader, writer = await asyncio.open_connection(*address)
    with closing(writer):
        writer.write(post(b'{"model": "tiny", "prompt": "x"}', "/v1/completions"))
        await service.began.wait()
        await asyncio.sleep(0.5)  # more than two header deadlines
        service.hold.set()
        assert (await read_reply(reader)).status == 200
        writer.write(get("/health"))
        assert (await read_reply(reader)).status == 200


async def test_one_connection_too_many_is_told_so_and_another_served_once_one_has_ended(
    address: Address, service: ScriptedService
) -> None:
    service.hold = asyncio.Event()
    writers = []
    for _ in range(MOST):
        service.began.clear()
        _, writer = await asyncio.open_connection(*address)
        writer.write(post(b'{"model": "tiny", "prompt": "x"}', "/v1/completions"))
        await service.began.wait()
        writers.append(writer)
    for data in (get("/health"), post(b"x" * 100_000)):
        reply = await exchange(address, data)
        assert (reply.status, reply.error["code"]) == (503, "overloaded")
        assert (reply.headers["connection"], reply.headers["retry-after"]) == ("close", "1")
    writers.pop().close()
    await service.aborted.get()
    assert (await exchange(address, get("/health"))).status == 200
    for writer in writers:
        writer.close()


async def test_many_too_many_end_somehow_and_take_no_place(
    address: Address, service: ScriptedService
) -> None:
    opened = await asyncio.gather(*(asyncio.open_connection(*address) for _ in range(10 * MOST)))

    async def outcome(reader: asyncio.StreamReader) -> str:
        try:
            return (await asyncio.wait_for(reader.read(), 10))[9:12].decode()
        except ConnectionResetError:
            return ""

    outcomes = await asyncio.gather(*(outcome(reader) for reader, _ in opened))
    assert 1 <= outcomes.count("503") < len(opened) - MOST and set(outcomes) == {"", "503"}
    for _, writer in opened:
        writer.close()
    assert (await exchange(address, get("/health"))).status == 200


def counts() -> dict[str, float]:
    """Requests by outcome, so far."""
    samples = (sample for family in metrics.REQUESTS.collect() for sample in family.samples)
    return {s.labels["outcome"]: s.value for s in samples if s.name.endswith("_total")}


async def counted(outcome: str, before: dict[str, float]) -> None:
    """Wait until one more request ended so, and no other ended."""
    async with asyncio.timeout(10):
        while (now := counts()) == before:
            await asyncio.sleep(0.01)
    assert now == before | {outcome: before.get(outcome, 0) + 1}


async def test_a_client_that_leaves_in_mid_body_is_no_error(
    address: Address, caplog: pytest.LogCaptureFixture
) -> None:
    before = counts()
    _, writer = await asyncio.open_connection(*address)
    writer.write(post(b'{"model"', length=100))
    await writer.drain()
    writer.close()
    await counted("aborted", before)
    assert (await exchange(address, get("/health"))).status == 200
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (post(b"{"), 400),
        (post(b'{"model": "nobody"}'), 404),
        (post(b'{"model": "tiny"}'), 400),
        (post(b"{}", "/v1/completions", "Content-Type: text/plain"), 415),
        (post(b"{", length=1 << 40), 413),
        (post(b"{", "/v1/completions", length=100), 408),
    ],
)
async def test_what_never_reaches_the_router_is_counted_once(
    address: Address, data: bytes, status: int
) -> None:
    before = counts()
    reply: Reply = await exchange(address, data)
    assert reply.status == status
    await counted("invalid", before)


async def test_what_reaches_the_router_and_what_is_no_request_is_not_counted_here(address: Address) -> None:
    before = counts()
    for data in (post(b'{"model": "tiny", "prompt": "x"}', "/v1/completions"), get("/nothing"), b"?\r\n\r\n"):
        await exchange(address, data)
    assert counts() == before
