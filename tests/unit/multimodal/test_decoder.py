from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from PIL import Image

from shared.errors import InvalidMedia, Overloaded, UnsupportedMedia
from shared.multimodal import decode_child
from shared.multimodal.decode_wire import OK, TOO_LARGE
from shared.multimodal.decoder import DecodeOptions, MediaDecoder
from shared.multimodal.image import ImageLimits
from tests.unit.multimodal.pictures import frames, picture, png

MODEL_SIZE = DecodeOptions(size=(128, 128))


@pytest_asyncio.fixture
async def decoder() -> AsyncIterator[MediaDecoder]:
    decoder = MediaDecoder()
    await decoder.start()
    yield decoder
    await decoder.close()


def child_of(decoder: MediaDecoder) -> asyncio.subprocess.Process:
    """The one idle child."""
    child = decoder._idle.get_nowait()
    decoder._idle.put_nowait(child)
    assert child is not None
    return child


async def test_pixels_equal_the_reference_conversion(decoder: MediaDecoder) -> None:
    for name, mode in [
        ("PNG", "RGB"),
        ("PNG", "RGBA"),
        ("JPEG", "RGB"),
        ("GIF", "P"),
        ("WEBP", "RGB"),
        ("JPEG", "CMYK"),
    ]:
        data = picture(name, (70, 40), mode)
        reference = Image.open(io.BytesIO(data)).convert("RGB").resize((128, 128), Image.Resampling.BICUBIC)
        pixels = await decoder.decode(data, MODEL_SIZE)
        assert pixels.shape == (128, 128, 3)
        assert pixels.data == reference.tobytes(), (name, mode)
    whole = await decoder.decode(picture("PNG", (7, 5)), DecodeOptions())
    assert whole.shape == (5, 7, 3)
    assert len(whole.data) == 105


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    status, size, pixels = decode_child.decode(picture("PNG", (9, 300), mode), "PNG", None, 10_000)
    assert (status, size, len(pixels)) == (OK, (9, 300), 9 * 300 * 3)


def test_sixteen_bit_grey_keeps_its_shades() -> None:
    grey = Image.new("I;16", (1, 1), 0x8000)
    out = io.BytesIO()
    grey.save(out, "PNG")
    assert decode_child.decode(out.getvalue(), "PNG", None, 100)[2] == b"\x80\x80\x80"


def test_the_first_frame_is_the_picture() -> None:
    assert decode_child.decode(frames("GIF", 3), "GIF", None, 10_000)[2][:3] == b"\0\0\0"


def test_the_child_trusts_neither_size_nor_format() -> None:
    assert decode_child.decode(picture("PNG", (50, 50)), "PNG", None, 2499) == (TOO_LARGE, (0, 0), b"")
    for name in ("PNG", "TIFF"):
        with pytest.raises((OSError, ValueError)):
            decode_child.decode(picture("JPEG"), name, None, 10_000)


async def test_bad_pixels_are_refused_and_the_child_lives_on(decoder: MediaDecoder) -> None:
    pid = child_of(decoder).pid
    whole = picture("JPEG", (200, 200))
    for bad in (whole[: len(whole) // 2], png(50, 50, pixels=b"no deflate stream")):
        with pytest.raises(InvalidMedia) as caught:
            await decoder.decode(bad, MODEL_SIZE)
        assert caught.value.code == "invalid_image"
    with pytest.raises(UnsupportedMedia):
        await decoder.decode(b"<svg/>", MODEL_SIZE)
    with pytest.raises(InvalidMedia):
        await decoder.decode(picture(), DecodeOptions(limits=ImageLimits(max_pixels=5)))
    assert (await decoder.decode(picture(), MODEL_SIZE)).shape == (128, 128, 3)
    assert child_of(decoder).pid == pid


async def test_a_dead_child_is_replaced(decoder: MediaDecoder) -> None:
    child = child_of(decoder)
    child.kill()
    await child.wait()
    with pytest.raises(InvalidMedia):
        await decoder.decode(picture(), MODEL_SIZE)
    assert (await decoder.decode(picture(), MODEL_SIZE)).shape == (128, 128, 3)
    assert child_of(decoder).pid != child.pid


async def test_a_hung_child_is_killed_and_replaced() -> None:
    decoder = MediaDecoder(timeout_s=0.2)
    await decoder.start()
    child = child_of(decoder)
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(InvalidMedia):
        await decoder.decode(picture(), MODEL_SIZE)
    assert await child.wait() == -signal.SIGKILL
    await decoder.start()
    assert child_of(decoder).pid != child.pid
    await decoder.close()


async def test_a_cancelled_decode_frees_its_place(decoder: MediaDecoder) -> None:
    child = child_of(decoder)
    os.kill(child.pid, signal.SIGSTOP)
    task = asyncio.create_task(decoder.decode(picture(), MODEL_SIZE))
    while decoder._idle.qsize():
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await child.wait() == -signal.SIGKILL
    assert (await decoder.decode(picture(), MODEL_SIZE)).shape == (128, 128, 3)


async def test_a_child_out_of_memory_is_a_refusal() -> None:
    decoder = MediaDecoder(memory_bytes=150 << 20)
    with pytest.raises(InvalidMedia):
        await decoder.decode(picture("PNG", (4000, 4000), "L"), DecodeOptions())
    await decoder.close()


async def test_a_decoder_that_cannot_start_says_so() -> None:
    decoder = MediaDecoder(memory_bytes=1 << 20)
    with pytest.raises(Overloaded):
        await decoder.start()
    with pytest.raises(Overloaded):
        await decoder.decode(picture(), MODEL_SIZE)
    await decoder.close()


async def test_two_children_decode_side_by_side() -> None:
    decoder = MediaDecoder(num_processes=2)
    results = await asyncio.gather(*(decoder.decode(picture(), MODEL_SIZE) for _ in range(6)))
    assert len({r.data for r in results}) == 1
    await decoder.close()


async def test_a_child_that_does_not_start_is_tried_again_and_then_said_to_be_busy() -> None:
    decoder = MediaDecoder()
    whole, broken = decoder._argv, (sys.executable, "-c", "raise SystemExit(1)")
    tries: list[int] = []
    start = decoder._try_to_spawn

    async def fails_once() -> asyncio.subprocess.Process | None:
        tries.append(1)
        decoder._argv = broken if len(tries) == 1 else whole
        return await start()

    decoder._try_to_spawn = fails_once  # type: ignore[method-assign]
    await decoder.start()
    assert len(tries) == 2
    await decoder.close()
    never = MediaDecoder()
    never._argv = broken
    with pytest.raises(Overloaded, match="does not start") as caught:
        await never.start()
    assert caught.value.retryable
    await never.close()
