"""The HTTP parser's edge: owns connections that never become a request, or not in time."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from services.router.gateway.errors import http_error_json
from services.router.gateway.limits import GatewayLimits
from shared.api.errors import error_headers, error_json
from shared.errors import Overloaded

MAX_URL_BYTES = 8 << 10
MAX_HEADER_BYTES = 64 << 10
MAX_NUM_HEADERS = 100
#: How long a connection that was turned away is listened to.
_LINGER_S = 0.5


class GatewayProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which bounds a request's head in size and time, bounds the number of connections,
    and refuses in OpenAI's form. ``turned_away`` is shared by the connections of one server."""

    def __init__(
        self, *args: Any, limits: GatewayLimits, turned_away: set[TurnedAway], **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._turned_away = turned_away
        self._refusal = (400, "the request is not valid HTTP")
        self._head_bytes = 0
        self._in_head = False
        self._head_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self._limits.max_connections:
            TurnedAway(transport, self._turned_away, self._limits.max_connections)
            return
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        between = self.cycle is None or self.cycle.response_complete
        if between and self._head_deadline is None and not self.transport.is_closing():
            self._await_head()

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._in_head = True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._refuse(414, "the URL is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEADER_BYTES or len(self.headers) > MAX_NUM_HEADERS:
            self._refuse(431, "the headers are too large")

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_came()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Called by the parser for anything it cannot go on with."""
        status, message = self._refusal
        self.transport.write(_reply(status, http_error_json(status, message)))
        self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        self._refusal = (status, message)
        raise ValueError(message)  # makes the parser give up

    def _await_head(self) -> None:
        """A whole head has to come in time, however many bytes come; where none came there is nothing to
        answer."""
        self._head_deadline = self.loop.call_later(self._limits.header_timeout_s, self._head_overdue)

    def _head_came(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def _head_overdue(self) -> None:
        self._head_deadline = None
        if self._in_head:
            self._refusal = (408, "the headers came too slowly")
            self.send_400_response("")
        self.transport.close()


class TurnedAway(asyncio.Protocol):
    """A connection over the cap: it is told so, and listened to for a moment.

    A socket that is closed with bytes unread is reset, and its client would never see the answer. As many
    may be listened to as may be served; others are closed at once.
    """

    def __init__(self, transport: asyncio.Transport, others: set[TurnedAway], most: int) -> None:
        self._others = others
        self._end: asyncio.TimerHandle | None = None
        transport.set_protocol(self)
        if len(others) >= most:
            transport.abort()
            return
        others.add(self)
        error = Overloaded("the server has as many connections as it takes")
        transport.write(_reply(error.http_status, error_json(error), error_headers(error)))
        transport.write_eof()
        self._end = asyncio.get_running_loop().call_later(_LINGER_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._others.discard(self)
        if self._end is not None:
            self._end.cancel()


def _reply(status: int, body: bytes, headers: dict[str, str] | None = None) -> bytes:
    """A whole response, after which the connection ends."""
    fields = {"content-type": "application/json", "connection": "close", "content-length": str(len(body))}
    lines = [f"{name}: {value}\r\n".encode() for name, value in (fields | (headers or {})).items()]
    return b"".join((STATUS_LINE[status], *lines, b"\r\n", body))
