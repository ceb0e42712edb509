"""Decodes pictures in disposable child processes: owns their start, time limits and replacement."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

from msgspec import Struct

from shared.errors import InternalError, InvalidMedia, Overloaded
from shared.multimodal.decode_wire import OK, READY, REPLY, REQUEST, TOO_LARGE
from shared.multimodal.image import DEFAULT_LIMITS, ImageLimits, inspect_image
from shared.telemetry.logs import get_logger

_IMPORT_ROOT = Path(__file__).resolve().parents[2]
_START_TIMEOUT_S = 30.0
_START_TRIES = 2

log = get_logger(__name__)


class DecodeOptions(Struct, frozen=True):
    """``size`` is (width, height) to resize to, bicubic; None = as it is."""

    size: tuple[int, int] | None = None
    limits: ImageLimits = DEFAULT_LIMITS


class Pixels(Struct, frozen=True):
    """RGB, uint8, ``shape`` = (height, width, 3), rows one after another."""

    data: bytes
    shape: tuple[int, int, int]


class MediaDecoder:
    """A pool of child processes. Use within one event loop; ``close`` before it ends."""

    def __init__(
        self, *, num_processes: int = 1, timeout_s: float = 5.0, memory_bytes: int = 1 << 30
    ) -> None:
        """``timeout_s`` bounds one picture, in wall time and in processor time."""
        self._timeout_s = timeout_s
        self._argv = (
            sys.executable,
            "-m",
            "shared.multimodal.decode_child",
            str(memory_bytes),
            str(max(1, int(timeout_s))),
        )
        self._idle: asyncio.LifoQueue[asyncio.subprocess.Process | None] = asyncio.LifoQueue()
        self._killed: list[asyncio.subprocess.Process] = []
        for _ in range(num_processes):
            self._idle.put_nowait(None)

    async def start(self) -> None:
        """Start every idle child now rather than at its first picture. Raises Overloaded."""
        waiting = [self._idle.get_nowait() for _ in range(self._idle.qsize())]
        try:
            for index, child in enumerate(waiting):
                waiting[index] = child or await self._spawn()
        finally:
            for child in waiting:
                self._idle.put_nowait(child)

    async def decode(self, data: bytes, options: DecodeOptions) -> Pixels:
        """The first frame's pixels. Raises InvalidMedia, UnsupportedMedia or RequestTooLarge; a child
        that dies or hangs on the picture is replaced and the picture refused."""
        header = inspect_image(data, options.limits)
        width, height = options.size or (0, 0)
        head = REQUEST.pack(header.format.encode(), len(data), width, height, options.limits.max_pixels)
        child = await self._idle.get()
        healthy = False
        try:
            child = child or await self._spawn()
            async with asyncio.timeout(self._timeout_s):
                pixels = await _exchange(child, head, data)
            healthy = True
        except (TimeoutError, EOFError, ConnectionError) as error:
            raise InvalidMedia("the image could not be decoded") from error
        finally:
            if not healthy and child is not None:
                self._kill(child)
            self._idle.put_nowait(child if healthy else None)
        if isinstance(pixels, int):
            code = "image_too_large" if pixels == TOO_LARGE else "invalid_image"
            raise InvalidMedia("the image could not be decoded", code=code)
        return pixels

    async def close(self) -> None:
        """End every child; decodes still running must have been cancelled before."""
        while not self._idle.empty():
            child = self._idle.get_nowait()
            if child is not None:
                self._kill(child)
        for child in self._killed:
            await child.wait()

    async def _spawn(self) -> asyncio.subprocess.Process:
        """A child that is ready. Raises Overloaded: another try, or another encoder, may fare better."""
        for _ in range(_START_TRIES):
            if (child := await self._try_to_spawn()) is not None:
                return child
        raise Overloaded("the image decoder does not start")

    async def _try_to_spawn(self) -> asyncio.subprocess.Process | None:
        child = await asyncio.create_subprocess_exec(
            *self._argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={"PYTHONPATH": str(_IMPORT_ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
            cwd="/",
        )
        ready = b""
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                ready = await _stdout(child).readexactly(len(READY))
        except (TimeoutError, EOFError) as error:
            log.warning("the image decoder did not start", problem=type(error).__name__)
        finally:
            if ready != READY:
                self._kill(child)
        return child if ready == READY else None

    def _kill(self, child: asyncio.subprocess.Process) -> None:
        """End a child; ``close`` waits until those still ending are gone."""
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        self._killed = [*(c for c in self._killed if c.returncode is None), child]


async def _exchange(child: asyncio.subprocess.Process, head: bytes, data: bytes) -> Pixels | int:
    """The child's pixels, or the status with which it refused."""
    if child.stdin is None:
        raise InternalError("the image decoder has no input")
    child.stdin.writelines((head, data))
    await child.stdin.drain()
    reader = _stdout(child)
    status, width, height, nbytes = REPLY.unpack(await reader.readexactly(REPLY.size))
    pixels = await reader.readexactly(nbytes)
    return Pixels(pixels, (height, width, 3)) if status == OK else int(status)


def _stdout(child: asyncio.subprocess.Process) -> asyncio.StreamReader:
    if child.stdout is None:
        raise InternalError("the image decoder has no output")
    return child.stdout
