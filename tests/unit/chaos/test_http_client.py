"""The lean client's framing, fed with bytes as they may come."""

from __future__ import annotations

import asyncio

import pytest

from tests.chaos.http_client import ResponseBroken, begin_call, request_bytes

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n1\r\n,\r\n6\r\n world\r\n0\r\n\r\n"
)
SIZED = b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\noops"


async def talk(response: bytes, step: int) -> tuple[int, bytes, list[bytes]]:
    """Status, body and request of one call to a server that writes ``step`` bytes at a time."""
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"}"))
        for start in range(0, len(response), step):
            writer.write(response[start : start + step])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    body = bytearray()
    async with server:
        address = server.sockets[0].getsockname()
        call = await begin_call(address, request_bytes("POST", "/x", b"{}"), body.extend)
        try:
            async with asyncio.timeout(5):
                await call.finished
        finally:
            call.drop()
    return call.status, bytes(body), requests


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("response", "status", "body"), [(CHUNKED, 200, b"hello, world"), (SIZED, 404, b"oops")]
)
async def test_bodies_are_taken_apart(response: bytes, status: int, body: bytes, step: int) -> None:
    got_status, got_body, (request,) = await talk(response, step)
    assert (got_status, got_body) == (status, body)
    assert request.startswith(b"POST /x HTTP/1.1\r\n") and request.endswith(b"\r\n\r\n{}")


@pytest.mark.parametrize("response", [CHUNKED[:-6], SIZED[:-1], b"HTTP/1.1 200", b"nonsense\r\n\r\n", b""])
async def test_half_an_answer_is_none(response: bytes) -> None:
    with pytest.raises(ResponseBroken):
        await talk(response, 7)
