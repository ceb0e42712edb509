"""Bounds of what a peer may send, and the refusal of what lies outside them.

Owns limits and words; what a client may ask for is bounded in ``shared.types.bounds``. Every failure is an
InvalidRequest that names the field and never echoes the value.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from google.protobuf.message import Message

from shared.errors import InvalidRequest
from shared.types import bounds

V = TypeVar("V")

MAX_ID_CHARS = 256
MAX_NAME_CHARS = 1024
MAX_TEXT_CHARS = 4 << 20
MAX_TOKENS = 1 << 19
MAX_TOKEN_ID = (1 << 31) - 1
MAX_BLOCKS = 1 << 17
MAX_HEADS = 4096
MAX_GROUPS = 64
MAX_ENDPOINTS = 16
MAX_ENDPOINT_BYTES = 64 << 10
MAX_HASH_BYTES = 64
MAX_ITEMS = 4096
MAX_CHOICES = bounds.MAX_CHOICES
MAX_LOGPROBS = bounds.MAX_TOP_LOGPROBS
MAX_LOGIT_BIAS = bounds.MAX_LOGIT_BIAS
MAX_STOP_IDS = bounds.MAX_STOP_IDS
MAX_SECONDS = 86400.0 * 365


def refuse(field: str, problem: str) -> InvalidRequest:
    """The error to raise."""
    return InvalidRequest(f"{field} {problem}", param=field)


def text(field: str, value: str, limit: int = MAX_NAME_CHARS, *, required: bool = False) -> str:
    if len(value) > limit:
        raise refuse(field, f"is longer than {limit} characters")
    if required and not value:
        raise refuse(field, "is missing")
    return value


def request_id(value: str) -> str:
    return text("request_id", value, MAX_ID_CHARS, required=True)


def count(field: str, items: Collection[object], limit: int, *, least: int = 0) -> int:
    """The number of items, which must lie in [least, limit]."""
    number = len(items)
    if number > limit:
        raise refuse(field, f"has more than {limit} entries")
    if number < least:
        raise refuse(field, f"has fewer than {least} entries")
    return number


def number(field: str, value: int, high: int, low: int = 0) -> int:
    if not low <= value <= high:
        raise refuse(field, f"must be between {low} and {high}")
    return value


def real(field: str, value: float, low: float, high: float) -> float:
    # The comparison is False for NaN.
    if not low <= value <= high:
        raise refuse(field, f"must be a number between {low:g} and {high:g}")
    return value


def finite(field: str, value: float) -> float:
    if not math.isfinite(value):
        raise refuse(field, "must be a finite number")
    return value


def token_ids(field: str, values: Collection[int], limit: int = MAX_TOKENS) -> tuple[int, ...]:
    count(field, values, limit)
    ids = tuple(values)
    if ids and max(ids) > MAX_TOKEN_ID:
        raise refuse(field, "holds a token id that is out of range")
    return ids


def ids(field: str, values: Collection[str], limit: int = MAX_ITEMS) -> tuple[str, ...]:
    """Identifiers: non-empty and short."""
    count(field, values, limit)
    found = tuple(values)
    if found and not (min(map(len, found)) > 0 and max(map(len, found)) <= MAX_ID_CHARS):
        raise refuse(field, "holds an empty or over-long identifier")
    return found


def hashes(field: str, values: Iterable[bytes]) -> tuple[bytes, ...]:
    found = tuple(values)
    if found and not (min(map(len, found)) > 0 and max(map(len, found)) <= MAX_HASH_BYTES):
        raise refuse(field, "holds an empty or over-long hash")
    return found


def member(field: str, value: int, names: Mapping[int, V]) -> V:
    """The name of an enum value; unknown ones are refused."""
    try:
        return names[value]
    except KeyError:
        raise refuse(field, "has an unknown value") from None


def present(message: Message, field: str) -> None:
    if not message.HasField(field):
        raise refuse(field, "is missing")
