"""The HTTP parser's edge: owns answers to requests that never become one."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from services.router.gateway.errors import http_error_json

MAX_URL_BYTES = 8 << 10
MAX_HEADER_BYTES = 64 << 10
MAX_NUM_HEADERS = 100


class GatewayProtocol(HttpToolsProtocol):
    """uvicorn's protocol (``http=GatewayProtocol`` in its Config), which bounds a request's head while it
    arrives and refuses malformed ones in OpenAI's form."""

    _refusal = (400, "the request is not valid HTTP")
    _head_bytes = 0

    def on_message_begin(self) -> None:
        self._head_bytes = 0
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

    def send_400_response(self, msg: str) -> None:
        """Called by the parser for anything it cannot go on with."""
        status, message = self._refusal
        body = http_error_json(status, message)
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(
            body
        )
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        self._refusal = (status, message)
        raise ValueError(message)  # makes the parser give up
