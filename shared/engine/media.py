"""Prepares raw media for an encoder runner: pixels from a child process, or the bytes as they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from shared.config.services import EncoderConfig
from shared.engine.encoder_core import Prepared
from shared.errors import InternalError, TriptychError
from shared.multimodal.decoder import DecodeOptions, MediaDecoder
from shared.multimodal.image import ImageLimits, inspect_image
from shared.multimodal.processor import load_processor
from shared.telemetry.logs import get_logger

log = get_logger(__name__)

Done = Callable[[Prepared | TriptychError], None]


class MediaFormat:
    """What decides a model's embeddings beside media and weights, and their shape (an EmbeddingFormat)."""

    def __init__(self, model_dir: Path, config: EncoderConfig, row_bytes: int, dtype: str) -> None:
        self._processor = load_processor(model_dir)
        self._limits = ImageLimits(max_bytes=config.max_media_bytes, max_pixels=config.max_pixels)
        self.processor_version = self._processor.version
        self.decode_options = str(self._processor.size)
        self.row_bytes = row_bytes
        self.dtype = dtype
        self.rows_per_block = config.rows_per_block

    def num_rows(self, data: bytes) -> int:
        """Rows that the media will have, by its header. Raises TriptychError."""
        header = inspect_image(data, self._limits)
        return self._processor.num_rows(header.width, header.height)


class RawMedia:
    """Media bytes as they are; the header says how many rows they make."""

    def __init__(self, model_dir: Path, config: EncoderConfig) -> None:
        self._processor = load_processor(model_dir)
        self._limits = ImageLimits(max_bytes=config.max_media_bytes, max_pixels=config.max_pixels)

    def prepare(self, data: bytes, done: Done) -> None:
        try:
            header = inspect_image(data, self._limits)
            done(Prepared(data, (len(data),), self._processor.num_rows(header.width, header.height)))
        except TriptychError as error:
            done(error)

    async def close(self) -> None:
        """Nothing was started."""


class PixelMedia:
    """Pictures decoded and resized in disposable child processes, driven from ``event_loop``."""

    def __init__(self, model_dir: Path, config: EncoderConfig, event_loop: asyncio.AbstractEventLoop) -> None:
        self._processor = load_processor(model_dir)
        self._limits = ImageLimits(max_bytes=config.max_media_bytes, max_pixels=config.max_pixels)
        self._decoder = MediaDecoder(num_processes=config.num_decoders, timeout_s=config.decode_timeout_s)
        self._event_loop = event_loop

    def prepare(self, data: bytes, done: Done) -> None:
        asyncio.run_coroutine_threadsafe(self._prepare(data, done), self._event_loop)

    async def _prepare(self, data: bytes, done: Done) -> None:
        try:
            header = inspect_image(data, self._limits)
            options = DecodeOptions(size=self._processor.size, limits=self._limits)
            pixels = await self._decoder.decode(data, options)
        except TriptychError as error:
            done(error)
        except OSError:
            done(InternalError("the picture decoder could not be started"))
        except Exception:
            # Whoever waits for the picture must hear of it.
            log.exception("a picture could not be prepared")
            done(InternalError("the picture could not be prepared"))
        else:
            num_rows = self._processor.num_rows(header.width, header.height)
            done(Prepared(pixels.data, pixels.shape, num_rows))

    async def close(self) -> None:
        """End the child processes."""
        await self._decoder.close()
