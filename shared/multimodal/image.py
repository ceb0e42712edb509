"""What pictures are let in: owns the allowlist and the caps, judged from headers; decodes no pixel."""

from __future__ import annotations

from msgspec import Struct

from shared.errors import InvalidMedia, RequestTooLarge, UnsupportedMedia
from shared.multimodal.dataurl import parse_data_url
from shared.multimodal.headers import Header, Malformed, detect, read_header

#: Formats by the media type that a client may declare.
FORMATS = {
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/jpg": "JPEG",
    "image/gif": "GIF",
    "image/webp": "WEBP",
}


class ImageLimits(Struct, frozen=True):
    """Caps on the pictures of one request. ``max_pixels`` counts all frames of one picture,
    ``max_total_pixels`` all pictures."""

    max_bytes: int = 20 << 20
    max_pixels: int = 16_000_000
    max_images: int = 16
    max_total_pixels: int = 64_000_000


DEFAULT_LIMITS = ImageLimits()


def inspect_image(data: bytes, limits: ImageLimits = DEFAULT_LIMITS) -> Header:
    """The header of an acceptable picture, in bounded time. Raises UnsupportedMedia for a format that
    is not allowed, RequestTooLarge, and InvalidMedia (``image_too_large`` or ``invalid_image``)."""
    if len(data) > limits.max_bytes:
        raise RequestTooLarge(f"an image may have at most {limits.max_bytes} bytes")
    if not data:
        raise InvalidMedia("the image is empty")
    picture_format = detect(data)
    if picture_format is None:
        raise UnsupportedMedia("only PNG, JPEG, WebP and GIF images are supported", param="messages")
    try:
        header = read_header(data, picture_format)
    except Malformed as error:
        raise InvalidMedia(str(error)) from error
    if header.total_pixels > limits.max_pixels:
        raise InvalidMedia(
            f"an image may have at most {limits.max_pixels} pixels over all frames", code="image_too_large"
        )
    return header


class ImageReader:
    """Reads the pictures of one request from data URLs, counting them against its caps."""

    def __init__(self, limits: ImageLimits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._num_images = 0
        self._num_pixels = 0

    def __call__(self, url: str) -> bytes:
        """The encoded bytes behind ``url``. Raises InvalidRequest, InvalidMedia, UnsupportedMedia or
        RequestTooLarge; nothing is ever fetched."""
        limits = self._limits
        self._num_images += 1
        if self._num_images > limits.max_images:
            raise InvalidMedia(
                f"a request may have at most {limits.max_images} images", code="too_many_images"
            )
        declared, data = parse_data_url(url, max_bytes=limits.max_bytes)
        if declared not in FORMATS:
            raise UnsupportedMedia("only PNG, JPEG, WebP and GIF images are supported", param="messages")
        header = inspect_image(data, limits)
        if header.format != FORMATS[declared]:
            raise InvalidMedia("the image is not of the declared media type")
        self._num_pixels += header.total_pixels
        if self._num_pixels > limits.max_total_pixels:
            raise InvalidMedia(
                f"the images of a request may have at most {limits.max_total_pixels} pixels together",
                code="image_too_large",
            )
        return data
