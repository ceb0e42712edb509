"""Parses data URLs strictly: owns what a media URL may look like; fetches nothing."""

from __future__ import annotations

import binascii
import re

from shared.errors import InvalidMedia, InvalidRequest, RequestTooLarge

_MEDIA_TYPE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}/[a-z0-9][a-z0-9.+-]{0,63}")
_MAX_HEADER = 160


def parse_data_url(url: str, *, max_bytes: int) -> tuple[str, bytes]:
    """Media type in lower case, and the decoded bytes, of ``data:TYPE/SUBTYPE;base64,...``.

    Sizes are judged before decoding. Raises InvalidRequest (``url_not_allowed`` for any other kind of
    URL), InvalidMedia, RequestTooLarge.
    """
    if url[:5].lower() != "data:":
        raise InvalidRequest("only data: URLs are allowed for media", code="url_not_allowed")
    comma = url.find(",", 0, _MAX_HEADER)
    if comma < 0:
        raise InvalidMedia("the data URL has no comma after a short media type")
    media_type, _, encoding = url[5:comma].lower().partition(";")
    if encoding != "base64":
        raise InvalidMedia("the data URL must say ;base64 and nothing else")
    if not _MEDIA_TYPE.fullmatch(media_type) or not media_type.startswith("image/"):
        raise InvalidMedia("the data URL is not of an image")
    if (len(url) - comma - 1) // 4 * 3 > max_bytes + 2:
        raise RequestTooLarge(f"an image may have at most {max_bytes} bytes")
    try:
        return media_type, binascii.a2b_base64(url[comma + 1 :].encode("ascii"), strict_mode=True)
    except ValueError as error:
        raise InvalidMedia("the data URL is not valid base64") from error
