"""Errors as OpenAI clients expect them: owns the body and headers; not which errors there are."""

from __future__ import annotations

import msgspec

from shared.errors import Overloaded, RateLimited, TriptychError

_RETRY_AFTER_S = 1


def error_json(error: TriptychError) -> bytes:
    """``{"error": {...}}``; ``code`` is always a string."""
    fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": fields})


def error_headers(error: TriptychError) -> dict[str, str]:
    """``Retry-After`` where another try may go better."""
    later = isinstance(error, Overloaded | RateLimited) or (error.http_status == 503 and error.retryable)
    return {"retry-after": str(_RETRY_AFTER_S)} if later else {}
