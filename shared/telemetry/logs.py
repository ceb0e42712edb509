"""Structured logs: one JSON object a line on stderr.

Owns format, limits and what may never be logged. A message is a constant text; everything variable
is a field. Prompt text, tokens and media have no place in a log: fields of those names are withheld.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import traceback
from datetime import UTC, datetime
from typing import Any, TextIO

from shared.clock import Clock, MonotonicClock

MAX_FIELD_CHARS = 500
MAX_TRACE_CHARS = 4000
#: A message may be logged this often by one logger within ``RATE_WINDOW_S``; the rest is counted.
RATE_LIMIT = 10
RATE_WINDOW_S = 10.0
WITHHELD = frozenset(
    {"prompt", "text", "content", "messages", "token_ids", "tokens", "data", "media", "image", "body"}
)
_FIELDS = "triptych_fields"


class Logger:
    """A named logger whose keyword arguments become fields."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, message: str, **fields: Any) -> None:
        self._log(logging.DEBUG, message, fields)

    def info(self, message: str, **fields: Any) -> None:
        self._log(logging.INFO, message, fields)

    def warning(self, message: str, **fields: Any) -> None:
        self._log(logging.WARNING, message, fields)

    def error(self, message: str, **fields: Any) -> None:
        self._log(logging.ERROR, message, fields)

    def exception(self, message: str, **fields: Any) -> None:
        """As ``error``, with the stack of the exception being handled."""
        self._log(logging.ERROR, message, fields, with_trace=True)

    def _log(self, level: int, message: str, fields: dict[str, Any], with_trace: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            # As an argument-free record: a "%" in the message means nothing.
            self._logger.log(level, "%s", message, exc_info=with_trace, extra={_FIELDS: fields})


def get_logger(name: str) -> Logger:
    """The logger of a module: ``get_logger(__name__)``."""
    return Logger(name)


def configure(
    service: str, level: str = "info", *, stream: TextIO | None = None, clock: Clock | None = None
) -> logging.Handler:
    """Send every log record of this process to ``stream`` (stderr) as JSON lines; replaces the root
    logger's handlers. Called once, by a service's main. Returns the handler, for tests to remove."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(service))
    handler.addFilter(RateLimit(clock or MonotonicClock()))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    return handler


class JsonFormatter(logging.Formatter):
    """One record as one line: JSON escapes every control character, and long values are cut."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._base = {"service": service, "pid": os.getpid()}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            **self._base,
            "logger": record.name,
            "message": _cut(record.getMessage(), MAX_FIELD_CHARS),
        }
        fields: dict[str, Any] = getattr(record, _FIELDS, {})
        for key, value in fields.items():
            line[f"{key}_" if key in line else key] = "(withheld)" if key in WITHHELD else _plain(value)
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = type(record.exc_info[1]).__name__
            # Frames only: an exception's own text may quote what a client sent.
            line["trace"] = _cut("".join(traceback.format_tb(record.exc_info[2])), MAX_TRACE_CHARS)
        return json.dumps(line, ensure_ascii=True, separators=(",", ":"))


class RateLimit(logging.Filter):
    """Lets a repeated message through ``RATE_LIMIT`` times a window; the first of the next window
    carries the number of those ``suppressed``."""

    def __init__(self, clock: Clock, *, limit: int = RATE_LIMIT, window_s: float = RATE_WINDOW_S) -> None:
        super().__init__()
        self._clock = clock
        self._limit = limit
        self._window_s = window_s
        self._seen: dict[tuple[str, int, str], list[float]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        fields = getattr(record, _FIELDS, None)
        key = (record.name, record.levelno, record.getMessage() if fields is not None else str(record.msg))
        now = self._clock.now()
        # [window start, records seen in it]
        window = self._seen.get(key)
        if window is None or now - window[0] >= self._window_s:
            suppressed = int(window[1] - self._limit) if window is not None else 0
            if suppressed > 0:
                setattr(record, _FIELDS, {**(fields or {}), "suppressed": suppressed})
            self._forget(now)
            self._seen[key] = [now, 1]
            return True
        window[1] += 1
        return window[1] <= self._limit

    def _forget(self, now: float) -> None:
        """Bound the table: messages are constants, but a library's may not be."""
        if len(self._seen) >= 1000:
            self._seen = {k: w for k, w in self._seen.items() if now - w[0] < self._window_s}
            if len(self._seen) >= 1000:
                self._seen.clear()


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return _cut(value if isinstance(value, str) else repr(value), MAX_FIELD_CHARS)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}...({len(text)} characters)"
