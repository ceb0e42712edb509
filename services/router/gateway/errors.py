"""Errors as HTTP responses: owns the mapping of exceptions to OpenAI's form."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from shared.api.errors import error_headers, error_json
from shared.errors import TriptychError

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
        headers = headers | {"connection": "close"}
    return Response(body, status, headers, "application/json")
