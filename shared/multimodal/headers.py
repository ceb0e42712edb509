"""Sizes of pictures from their headers: owns the four formats' layouts; decodes no pixel.

Every reader hops from one length field to the next within the given bytes, a bounded number of
times, and raises ``Malformed`` when the structure does not hold.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

from msgspec import Struct

#: Most hops over chunks, segments or blocks of one picture.
MAX_HOPS = 200_000


class Malformed(Exception):
    """The bytes are not a whole picture of their format."""


class Header(Struct, frozen=True):
    """``width`` x ``height`` of the first frame in pixels; ``num_frames`` of an animation (1 =
    still); ``largest_frame`` in pixels, over all frames."""

    format: str
    width: int
    height: int
    num_frames: int = 1
    largest_frame: int = 0

    @property
    def total_pixels(self) -> int:
        """Pixels of all frames, as if each were as large as the largest."""
        return max(self.width * self.height, self.largest_frame) * self.num_frames


def detect(data: bytes) -> str | None:
    """The format by magic bytes, one of READERS; None for anything else."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WEBP"
    return None


def read_header(data: bytes, picture_format: str) -> Header:
    """The header of a picture that ``detect`` named. Raises Malformed."""
    try:
        header = READERS[picture_format](data)
    except (struct.error, IndexError) as error:
        raise Malformed("the picture is truncated") from error
    if header.width < 1 or header.height < 1:
        raise Malformed("the picture has no pixels")
    return header


def _hops() -> Iterator[None]:
    for _ in range(MAX_HOPS):
        yield
    raise Malformed("the picture has too many parts")


def _read_png(data: bytes) -> Header:
    """Chunks of (length, name, bytes, checksum) from offset 8: IHDR first, acTL if animated, IEND last."""
    length, name, width, height = struct.unpack_from(">I4sII", data, 8)
    if name != b"IHDR" or length != 13:
        raise Malformed("the PNG does not begin with its header")
    num_frames, largest, offset, pixels_seen = 1, 0, 8, False
    for _ in _hops():
        length, name = struct.unpack_from(">I4s", data, offset)
        if name == b"IEND":
            break
        if name == b"acTL":
            num_frames = max(1, struct.unpack_from(">I", data, offset + 8)[0])
        elif name == b"fcTL":
            frame_width, frame_height = struct.unpack_from(">II", data, offset + 12)
            largest = max(largest, frame_width * frame_height)
        pixels_seen |= name == b"IDAT"
        offset += 12 + length
    if not pixels_seen or offset + 12 != len(data):
        raise Malformed("the PNG does not end where it should")
    return Header("PNG", width, height, num_frames, largest)


_JPEG_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
_JPEG_BARE = frozenset({0x01, *range(0xD0, 0xD9)})


def _read_jpeg(data: bytes) -> Header:
    """Segments of (0xFF, marker, length, bytes) up to the frame header, which must precede the scan."""
    offset = 2
    for _ in _hops():
        while data[offset] == 0xFF and data[offset + 1] == 0xFF:  # fill bytes
            offset += 1
        if data[offset] != 0xFF:
            break
        marker = data[offset + 1]
        if marker in _JPEG_FRAMES:
            _, _, height, width = struct.unpack_from(">HBHH", data, offset + 2)
            return Header("JPEG", width, height)
        if marker in (0xD9, 0xDA):
            break
        offset += 2
        if marker not in _JPEG_BARE:
            offset += max(2, struct.unpack_from(">H", data, offset)[0])
    raise Malformed("the JPEG has no frame header")


def _read_gif(data: bytes) -> Header:
    """Screen header, colour table, then extensions (0x21) and frames (0x2C) of sub-blocks to 0x3B."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    offset = 13 + _colour_table(flags)
    num_frames = largest = 0
    hops = _hops()
    for _ in hops:
        kind = data[offset]
        if kind == 0x3B:
            break
        if kind == 0x2C:
            left, top, frame_width, frame_height, flags = struct.unpack_from("<HHHHB", data, offset + 1)
            num_frames += 1
            largest = max(largest, (left + frame_width) * (top + frame_height))
            if num_frames == 1:
                width, height = max(width, left + frame_width), max(height, top + frame_height)
            offset += 11 + _colour_table(flags)
        elif kind == 0x21:
            offset += 2
        else:
            raise Malformed("the GIF has an unknown block")
        while data[offset]:
            offset += 1 + data[offset]
            next(hops)
        offset += 1
    if not num_frames:
        raise Malformed("the GIF has no frame")
    return Header("GIF", width, height, num_frames, largest)


def _colour_table(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _read_webp(data: bytes) -> Header:
    """One RIFF container: VP8 or VP8L alone, or VP8X with a canvas and perhaps ANMF frames."""
    (size,) = struct.unpack_from("<I", data, 4)
    if len(data) - 8 not in (size, size + (size & 1)):
        raise Malformed("the WebP does not end where it should")
    name = data[12:16]
    if name == b"VP8 ":
        return Header("WEBP", *_vp8_size(data, 20))
    if name == b"VP8L":
        return Header("WEBP", *_vp8l_size(data, 20))
    if name != b"VP8X":
        raise Malformed("the WebP has no picture")
    width, height = 1 + _uint24(data, 24), 1 + _uint24(data, 27)
    num_frames = largest = 0
    offset = 12
    for _ in _hops():
        if offset + 8 > len(data):
            break
        name, length = struct.unpack_from("<4sI", data, offset)
        if name == b"ANMF":
            num_frames += 1
            largest = max(largest, (1 + _uint24(data, offset + 14)) * (1 + _uint24(data, offset + 17)))
        offset += 8 + length + (length & 1)
    return Header("WEBP", width, height, max(1, num_frames), largest)


def _vp8_size(data: bytes, offset: int) -> tuple[int, int]:
    if data[offset + 3 : offset + 6] != b"\x9d\x01\x2a":
        raise Malformed("the WebP has no key frame")
    width, height = struct.unpack_from("<HH", data, offset + 6)
    return width & 0x3FFF, height & 0x3FFF


def _vp8l_size(data: bytes, offset: int) -> tuple[int, int]:
    if data[offset] != 0x2F:
        raise Malformed("the WebP has no lossless signature")
    (bits,) = struct.unpack_from("<I", data, offset + 1)
    return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)


def _uint24(data: bytes, offset: int) -> int:
    return int.from_bytes(data[offset : offset + 3], "little") if offset + 3 <= len(data) else 0


READERS: dict[str, Callable[[bytes], Header]] = {
    "PNG": _read_png,
    "JPEG": _read_jpeg,
    "GIF": _read_gif,
    "WEBP": _read_webp,
}
