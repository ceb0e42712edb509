"""Pictures for tests, made by the image library or byte by byte."""

from __future__ import annotations

import io
import struct
import zlib

from PIL import Image


def picture(
    picture_format: str = "PNG", size: tuple[int, int] = (20, 10), mode: str = "RGB", **options: object
) -> bytes:
    """An encoded picture with a gradient, so that pixels differ."""
    grey = Image.linear_gradient("L").resize(size)
    out = io.BytesIO()
    grey.convert(mode).save(out, picture_format, **options)
    return out.getvalue()


def frames(picture_format: str, num_frames: int, size: tuple[int, int] = (20, 10)) -> bytes:
    """An animation whose frames differ."""
    images = [Image.new("RGB", size, (index * 50 % 256, 0, 0)) for index in range(num_frames)]
    out = io.BytesIO()
    images[0].save(out, picture_format, save_all=True, append_images=images[1:])
    return out.getvalue()


def png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *chunks: bytes, pixels: bytes = b"") -> bytes:
    """A PNG that claims a size whatever its pixels are."""
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    body = png_chunk(b"IDAT", pixels or zlib.compress(bytes(100)))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + body + png_chunk(b"IEND", b"")
