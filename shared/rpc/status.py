"""The error tree on gRPC: a status code by name, and the exact error in trailing metadata.

Owns both directions. Details of foreign errors never pass: a transport's own words name addresses.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, unquote

import grpc

from shared.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    RequestTooLarge,
    TriptychError,
    Unauthenticated,
    WorkerLost,
    all_errors,
    from_code,
)

ERROR_KEY, CODE_KEY, PARAM_KEY = "triptych-error", "triptych-code", "triptych-param"
#: Trailing metadata travels in one HTTP/2 header frame, so its texts are cut.
MAX_MESSAGE_CHARS = 1000
MAX_PARAM_CHARS = 200

_FOREIGN: dict[grpc.StatusCode, tuple[type[TriptychError], str]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (InvalidRequest, "the peer refused the request"),
    grpc.StatusCode.OUT_OF_RANGE: (InvalidRequest, "the peer refused the request"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (RequestTooLarge, "the message is larger than the limit"),
    grpc.StatusCode.UNAUTHENTICATED: (Unauthenticated, "the peer asks for credentials"),
    grpc.StatusCode.PERMISSION_DENIED: (PermissionDenied, "the peer refused access"),
    grpc.StatusCode.NOT_FOUND: (NotFound, "not found"),
    grpc.StatusCode.UNAVAILABLE: (WorkerLost, "the peer is not reachable"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (DeadlineExceeded, "the peer did not answer in time"),
    grpc.StatusCode.CANCELLED: (Cancelled, "the call was cancelled"),
}


def status_of(error: TriptychError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Status code, details and trailing metadata that say ``error``."""
    metadata = [(ERROR_KEY, type(error).__name__), (CODE_KEY, _ascii(error.code))]
    if error.param is not None:
        metadata.append((PARAM_KEY, _ascii(error.param[:MAX_PARAM_CHARS])))
    return grpc.StatusCode[error.grpc_code], error.message[:MAX_MESSAGE_CHARS], tuple(metadata)


def error_of(failure: grpc.aio.AioRpcError) -> TriptychError:
    """The error that the peer raised, or the nearest one for a failure of the transport."""
    found: dict[str, str] = {}
    metadata: Any = failure.trailing_metadata() or ()
    for key, value in metadata:
        if key in (ERROR_KEY, CODE_KEY, PARAM_KEY) and isinstance(value, str):
            found[key] = unquote(value)
    if ERROR_KEY not in found:
        cls, message = _FOREIGN.get(failure.code(), (InternalError, "the peer failed"))
        return cls(message)
    message = failure.details() or ""
    code = found.get(CODE_KEY, "")
    known = {cls.__name__: cls for cls in all_errors()}.get(found[ERROR_KEY])
    # A class of a newer build: its code may still be known here.
    error = from_code(code, message) if known is None else known(message)
    error.code = code or error.code
    error.param = found.get(PARAM_KEY)
    return error


def _ascii(text: str) -> str:
    return quote(text, safe="[]{}()<>.,:;/?!@#$&*+='\" _-~|^`")
