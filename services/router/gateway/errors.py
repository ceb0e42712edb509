"""Errors as HTTP responses: owns the mapping of exceptions to OpenAI's form, and the count of those that
kept a request from the router."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from shared.api.errors import error_headers, error_json
from shared.errors import InternalError, InvalidRequest, TriptychError
from shared.telemetry import metrics
from shared.telemetry.outcome import outcome_of

#: Type and code of errors that HTTP itself makes.
_BY_STATUS = {
    404: ("not_found_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("timeout", "request_timeout"),
    414: ("invalid_request_error", "uri_too_long"),
    431: ("invalid_request_error", "headers_too_large"),
}
#: After these the rest of a request may still be on its way.
_CLOSING = frozenset({408, 413, 414, 415, 431})
#: How much of that rest is thrown away, and how long its pauses may be, before the connection is closed.
_MAX_DISCARDED = 256 << 20
_QUIET_S = 0.5


def error_response(error: TriptychError) -> Response:
    """An error of ours."""
    return _response(error.http_status, error_json(error), error_headers(error))


def http_error_response(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """An error of the HTTP layer, in the same form."""
    return _response(status, http_error_json(status, message), headers or {})


def http_error_json(status: int, message: str) -> bytes:
    """The body of such an error."""
    kind, code = _BY_STATUS.get(status, ("invalid_request_error", "invalid_request"))
    fields = {"message": message, "type": kind, "param": None, "code": code}
    return msgspec.json.encode({"error": fields})


@contextmanager
def refusals_counted() -> Iterator[None]:
    """Counts the error that the block ends with as the outcome of a request: the router counts only those
    that reach it."""
    try:
        yield
    except Exception as error:
        metrics.REQUESTS.labels(outcome_of(_as_ours(error))).inc()
        raise


def _as_ours(error: Exception) -> TriptychError:
    if isinstance(error, TriptychError):
        return error
    client_s = isinstance(error, HTTPException) and error.status_code < 500
    return InvalidRequest("") if client_s else InternalError("")


def install_error_handlers(app: FastAPI) -> None:
    """Give every error that a route raises its response."""

    async def on_ours(request: Request, error: Exception) -> Response:
        if not isinstance(error, TriptychError):
            raise error
        return error_response(error)

    async def on_http(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            raise error
        message = "no such route" if error.status_code == 404 else str(error.detail).lower()
        return http_error_response(error.status_code, message, dict(error.headers or {}))

    app.add_exception_handler(TriptychError, on_ours)
    app.add_exception_handler(HTTPException, on_http)


def _response(status: int, body: bytes, headers: dict[str, str]) -> Response:
    if status in _CLOSING:
        return _LastResponse(body, status, headers | {"connection": "close"}, "application/json")
    return Response(body, status, headers, "application/json")


class _LastResponse(Response):
    """Answers before the request has arrived whole, and closes the connection a little later.

    A socket that is closed while bytes are on their way to it is reset, and a client that is still writing
    would never see the answer. So what comes is thrown away until the client listens: until nothing comes
    for a while, or too much has.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await send(start)
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        await _discard(receive)
        await send({"type": "http.response.body", "body": b""})


async def _discard(receive: Receive) -> None:
    size = 0
    while size < _MAX_DISCARDED:
        try:
            async with asyncio.timeout(_QUIET_S):
                message = await receive()
        except TimeoutError:
            return
        if not message.get("more_body"):  # all of it, or the client has gone
            return
        size += len(message.get("body", b""))
