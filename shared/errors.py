"""The error tree; each error has one gRPC code (by name) and one HTTP status.

    TriptychError
    ├── InvalidRequest            INVALID_ARGUMENT     400
    │   ├── ContextLengthExceeded INVALID_ARGUMENT     400
    │   └── InvalidMedia          INVALID_ARGUMENT     400
    ├── UnsupportedMedia          INVALID_ARGUMENT     415
    ├── RequestTooLarge           RESOURCE_EXHAUSTED   413
    ├── Unauthenticated           UNAUTHENTICATED      401
    ├── PermissionDenied          PERMISSION_DENIED    403
    ├── NotFound                  NOT_FOUND            404
    │   └── ModelNotFound         NOT_FOUND            404
    ├── RateLimited               RESOURCE_EXHAUSTED   429
    ├── Overloaded                UNAVAILABLE          503
    ├── DeadlineExceeded          DEADLINE_EXCEEDED    504
    ├── Cancelled                 CANCELLED            499
    └── InternalError             INTERNAL             500
        ├── WorkerLost            UNAVAILABLE          503   retryable
        ├── NumericalError        INTERNAL             500
        ├── DeterminismViolation  INTERNAL             500
        ├── ConfigError           FAILED_PRECONDITION  500
        ├── OutOfBlocks           RESOURCE_EXHAUSTED   503   retryable
        └── TransferError         UNAVAILABLE          503   retryable
            ├── TransferTimeout   DEADLINE_EXCEEDED    503   retryable
            ├── PeerLost          UNAVAILABLE          503   retryable
            ├── StaleBlock        ABORTED              503   retryable
            └── CorruptBlock      DATA_LOSS            503   retryable

``code`` is the machine-readable name in error bodies, ``param`` the offending field if there is
one. Messages go to clients: no paths, addresses, host names or prompt text in them.
"""

from __future__ import annotations

from typing import ClassVar


class TriptychError(Exception):
    """Base of all errors that cross a boundary."""

    grpc_code: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(TriptychError):
    grpc_code, http_status = "INVALID_ARGUMENT", 400
    type, code = "invalid_request_error", "invalid_value"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class InvalidMedia(InvalidRequest):
    """Whoever notices knows nothing of the request around the picture: pictures come in its messages."""

    code = "invalid_image"

    def __init__(self, message: str, *, param: str | None = "messages", code: str | None = None) -> None:
        super().__init__(message, param=param or "messages", code=code)


class UnsupportedMedia(TriptychError):
    grpc_code, http_status = "INVALID_ARGUMENT", 415
    type, code = "invalid_request_error", "unsupported_media"


class RequestTooLarge(TriptychError):
    grpc_code, http_status = "RESOURCE_EXHAUSTED", 413
    type, code = "invalid_request_error", "request_too_large"


class Unauthenticated(TriptychError):
    grpc_code, http_status = "UNAUTHENTICATED", 401
    type, code = "authentication_error", "invalid_api_key"


class PermissionDenied(TriptychError):
    grpc_code, http_status = "PERMISSION_DENIED", 403
    type, code = "permission_error", "permission_denied"


class NotFound(TriptychError):
    grpc_code, http_status = "NOT_FOUND", 404
    type, code = "not_found_error", "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class RateLimited(TriptychError):
    grpc_code, http_status = "RESOURCE_EXHAUSTED", 429
    type, code = "rate_limit_error", "rate_limited"


class Overloaded(TriptychError):
    grpc_code, http_status = "UNAVAILABLE", 503
    type, code = "server_error", "overloaded"
    retryable = True


class DeadlineExceeded(TriptychError):
    grpc_code, http_status = "DEADLINE_EXCEEDED", 504
    type, code = "timeout", "deadline_exceeded"


class Cancelled(TriptychError):
    grpc_code, http_status = "CANCELLED", 499
    type, code = "cancelled", "cancelled"


class InternalError(TriptychError):
    pass


class WorkerLost(InternalError):
    grpc_code, http_status = "UNAVAILABLE", 503
    code = "worker_lost"
    retryable = True


class NumericalError(InternalError):
    code = "numerical_error"


class DeterminismViolation(InternalError):
    code = "determinism_violation"


class ConfigError(InternalError):
    grpc_code = "FAILED_PRECONDITION"
    code = "config_error"


class OutOfBlocks(InternalError):
    grpc_code, http_status = "RESOURCE_EXHAUSTED", 503
    code = "out_of_blocks"
    retryable = True


class TransferError(InternalError):
    grpc_code, http_status = "UNAVAILABLE", 503
    code = "transfer_failed"
    retryable = True


class TransferTimeout(TransferError):
    grpc_code = "DEADLINE_EXCEEDED"
    code = "transfer_timeout"


class PeerLost(TransferError):
    code = "peer_lost"


class StaleBlock(TransferError):
    grpc_code = "ABORTED"
    code = "stale_block"


class CorruptBlock(TransferError):
    grpc_code = "DATA_LOSS"
    code = "corrupt_block"


def all_errors() -> list[type[TriptychError]]:
    """Every class of the tree, parents before children."""
    found: list[type[TriptychError]] = []
    queue: list[type[TriptychError]] = [TriptychError]
    while queue:
        cls = queue.pop(0)
        found.append(cls)
        queue.extend(cls.__subclasses__())
    return found


def from_code(code: str, message: str, param: str | None = None) -> TriptychError:
    """The error whose ``code`` this is, as rebuilt from a wire record; InternalError when unknown."""
    for cls in all_errors():
        if cls.code == code:
            return cls(message, param=param)
    return InternalError(message, param=param, code=code)
