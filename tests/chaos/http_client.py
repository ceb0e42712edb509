"""A lean HTTP/1.1 client on plain asyncio: one connection a call, body bytes as they arrive.

Owns framing of responses; not what bodies mean. A call that is dropped closes its socket at once, which
is how a client goes away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class ResponseBroken(ConnectionError):
    """The connection ended, or made no sense, before the response was whole."""


class HttpCall(asyncio.Protocol):
    """One request and its response. ``on_body`` gets each run of body bytes, in order.

    After ``finished`` is done without an exception, ``status`` and the whole body are there.
    """

    def __init__(self, request: bytes, on_body: Callable[[bytes], None]) -> None:
        self._request = request
        self._on_body = on_body
        self._buffer = b""
        self._transport: asyncio.BaseTransport | None = None
        self._left = -1  # body bytes still due; -1 = chunked
        self._in_body = False
        self.status = 0
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def drop(self) -> None:
        """Go away now; ``finished`` is cancelled if the response was not whole."""
        if not self.finished.done():
            self.finished.cancel()
        if isinstance(self._transport, asyncio.Transport):
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.finished.done():
            return
        try:
            if not self._in_body:
                data = self._head(self._buffer + data)
            if self._in_body:
                self._body(data)
        except (ValueError, IndexError):
            self._end(ResponseBroken("malformed response"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(ResponseBroken("the connection ended in the middle of a response"))

    # inside

    def _head(self, data: bytes) -> bytes:
        head, found, rest = data.partition(b"\r\n\r\n")
        if not found:
            self._buffer = data
            return b""
        lines = head.split(b"\r\n")
        self.status = int(lines[0].split(b" ", 2)[1])
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                self._left = int(value)
        self._in_body, self._buffer = True, b""
        return rest

    def _body(self, data: bytes) -> None:
        if self._left >= 0:
            self._left -= len(data)
            if data:
                self._on_body(data)
            if self._left <= 0:
                self._end(None)
            return
        self._chunks(self._buffer + data)

    def _chunks(self, data: bytes) -> None:
        """Take whole chunks off ``data`` and keep the rest for later."""
        start, parts = 0, []
        while True:
            line_end = data.find(b"\r\n", start)
            if line_end < 0:
                break
            size = int(data[start:line_end], 16)
            end = line_end + 2 + size
            if len(data) < end + 2:
                break
            if size == 0:
                start = -1
                break
            parts.append(data[line_end + 2 : end])
            start = end + 2
        if parts:
            self._on_body(b"".join(parts))
        if start < 0:
            self._end(None)
        else:
            self._buffer = data[start:]

    def _end(self, problem: Exception | None) -> None:
        if self.finished.done():
            return
        if problem is None:
            self.finished.set_result(None)
        else:
            self.finished.set_exception(problem)
        if isinstance(self._transport, asyncio.Transport):
            self._transport.close()


def request_bytes(method: str, path: str, body: bytes = b"") -> bytes:
    """The bytes of a request with a JSON body."""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    if body:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


async def begin_call(address: tuple[str, int], request: bytes, on_body: Callable[[bytes], None]) -> HttpCall:
    """Connect and send. Raises OSError when nobody listens."""
    loop = asyncio.get_running_loop()
    _, call = await loop.create_connection(lambda: HttpCall(request, on_body), *address)
    return call
