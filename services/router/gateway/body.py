"""Reads request bodies: owns media type, size and time limits on the way in, and where they are parsed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from fastapi import HTTPException, Request
from starlette.requests import ClientDisconnect

from services.router.gateway.limits import GatewayLimits
from shared.errors import Cancelled, RequestTooLarge, UnsupportedMedia

T = TypeVar("T")

#: Parsing up to so many bytes is quicker than handing them to a thread.
HEAVY_BYTES = 32 << 10


async def read_body(request: Request, limits: GatewayLimits) -> bytes:
    """The body of a request that says it is JSON. Raises UnsupportedMedia, RequestTooLarge, Cancelled when
    the client leaves before its end, or HTTPException 408 when it sends too slowly."""
    _check_media_type(request)
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            return await _read(request, limits.max_body)
    except TimeoutError:
        raise HTTPException(408, "the body came too slowly") from None
    except ClientDisconnect:
        raise Cancelled("the client went away") from None


async def parsed(body: bytes, parse: Callable[[bytes], T]) -> T:
    """What ``parse`` makes of a body, or raises; off the event loop where that may take long."""
    return await asyncio.to_thread(parse, body) if len(body) > HEAVY_BYTES else parse(body)


def _check_media_type(request: Request) -> None:
    media_type, _, parameters = request.headers.get("content-type", "").partition(";")
    if media_type.strip().lower() != "application/json":
        raise UnsupportedMedia("the content type must be application/json")
    charset = parameters.strip().lower().replace('"', "").replace(" ", "")
    if charset not in ("", "charset=utf-8"):
        raise UnsupportedMedia("the body must be UTF-8")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMedia("encoded bodies are not supported")


async def _read(request: Request, max_bytes: int) -> bytes:
    """All of the body, counted while it comes."""
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    size, chunks = 0, []
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(max_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body may have at most {max_bytes} bytes")
