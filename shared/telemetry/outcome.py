"""How a request ended, as one word for metrics: owns the mapping from errors."""

from __future__ import annotations

from shared.errors import Cancelled, DeadlineExceeded, Overloaded, RateLimited, TriptychError


def outcome_of(error: TriptychError | None) -> str:
    """A label of ``metrics.REQUESTS``; ``error`` None = served."""
    if error is None:
        return "ok"
    if isinstance(error, Cancelled):
        return "aborted"
    if isinstance(error, Overloaded | RateLimited):
        return "rejected"
    if isinstance(error, DeadlineExceeded):
        return "expired"
    return "invalid" if error.http_status < 500 else "failed"
