"""The disposable process that decodes pictures: owns every call into native image libraries.

``python -m shared.multimodal.decode_child MEMORY_BYTES CPU_SECONDS``; frames of ``decode_wire`` on
standard input and output. It has no file to write, little memory and little time, and ends when its
input does or when a picture makes it.
"""

from __future__ import annotations

import io
import resource
import sys
from typing import BinaryIO

from PIL import Image

from shared.multimodal.decode_wire import INVALID, OK, READY, REPLY, REQUEST, TOO_LARGE

_FORMATS = ("PNG", "JPEG", "GIF", "WEBP")


def main(memory_bytes: int, cpu_seconds: int) -> None:
    """Serve frames until standard input ends."""
    _limit_process(memory_bytes)
    Image.init()
    Image.MAX_IMAGE_PIXELS = None  # each frame brings its own cap
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sink.write(READY)
    sink.flush()
    while len(head := source.read(REQUEST.size)) == REQUEST.size:
        name, nbytes, width, height, max_pixels = REQUEST.unpack(head)
        _limit_cpu(cpu_seconds)
        _answer(sink, source.read(nbytes), name.rstrip(b"\0").decode(), (width, height), max_pixels)


def _answer(sink: BinaryIO, data: bytes, name: str, size: tuple[int, int], max_pixels: int) -> None:
    try:
        status, (width, height), pixels = decode(data, name, size if size[0] else None, max_pixels)
    except MemoryError:
        status, (width, height), pixels = TOO_LARGE, (0, 0), b""
    except Exception:  # whatever a decoder raises on hostile bytes, the answer is the same
        status, (width, height), pixels = INVALID, (0, 0), b""
    sink.write(REPLY.pack(status, width, height, len(pixels)))
    sink.write(pixels)
    sink.flush()


def decode(
    data: bytes, name: str, size: tuple[int, int] | None, max_pixels: int
) -> tuple[int, tuple[int, int], bytes]:
    """Status, (width, height), and RGB bytes row by row, of the first frame. Orientation tags are not
    applied. Raises whatever the image library raises."""
    if name not in _FORMATS:
        raise ValueError("format not allowed")
    with Image.open(io.BytesIO(data), formats=(name,)) as picture:
        if picture.width * picture.height > max_pixels:
            return TOO_LARGE, (0, 0), b""
        rgb = _to_rgb(picture)
    if size is not None:
        rgb = rgb.resize(size, Image.Resampling.BICUBIC)
    return OK, rgb.size, rgb.tobytes()


def _to_rgb(picture: Image.Image) -> Image.Image:
    """8-bit RGB; 16-bit grey keeps its upper byte instead of being clipped."""
    if picture.mode.startswith("I"):
        picture = picture.convert("I").point(lambda value: value / 256).convert("L")
    return picture.convert("RGB")


def _limit_process(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_cpu(seconds: int) -> None:
    """Allow this much more processor time; beyond it the kernel ends the process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(usage.ru_utime + usage.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
