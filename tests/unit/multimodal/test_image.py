from __future__ import annotations

import base64
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import InvalidMedia, RequestTooLarge, TriptychError, UnsupportedMedia
from shared.multimodal import headers
from shared.multimodal.image import ImageLimits, ImageReader, inspect_image
from tests.unit.multimodal.pictures import frames, picture, png, png_chunk

FORMATS = ("PNG", "JPEG", "GIF", "WEBP")


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [(1, 1), (17, 300), (640, 3)])
def test_the_header_tells_the_size(name: str, size: tuple[int, int]) -> None:
    header = inspect_image(picture(name, size))
    assert (header.format, header.width, header.height, header.num_frames) == (name, *size, 1)


@pytest.mark.parametrize(
    ("name", "mode", "options"),
    [
        ("JPEG", "L", {"progressive": True}),
        ("JPEG", "CMYK", {"exif": b"Exif\0\0" + bytes(50), "comment": b"\xff\xc0 not a frame"}),
        ("PNG", "I;16", {}),
        ("PNG", "P", {"transparency": 0}),
        ("WEBP", "RGBA", {"lossless": True}),
        ("WEBP", "RGBA", {"exif": b"Exif\0\0" + bytes(51)}),
        ("WEBP", "L", {}),
    ],
)
def test_every_kind_of_header_is_read(name: str, mode: str, options: dict[str, object]) -> None:
    header = inspect_image(picture(name, (33, 44), mode, **options))
    assert (header.width, header.height) == (33, 44)


@pytest.mark.parametrize("name", ["GIF", "WEBP", "PNG"])
def test_all_frames_count(name: str) -> None:
    animation = frames(name, 5)
    assert inspect_image(animation).num_frames == 5
    assert inspect_image(animation, ImageLimits(max_pixels=1000)).total_pixels == 1000
    with pytest.raises(InvalidMedia) as caught:
        inspect_image(animation, ImageLimits(max_pixels=999))
    assert caught.value.code == "image_too_large"


@pytest.mark.parametrize(
    "bomb",
    [
        png(65_535, 65_535),
        png(100, 100, png_chunk(b"acTL", struct.pack(">II", 10_000, 0))),
        png(100, 100, png_chunk(b"fcTL", struct.pack(">IIIIIHHBB", 0, 60_000, 60_000, 0, 0, 1, 1, 0, 0))),
        b"GIF89a" + struct.pack("<HHBBB", 65_535, 65_535, 0, 0, 0) + b"\x2c" + bytes(9) + b"\x02\x00\x3b",
        b"GIF89a"
        + struct.pack("<HHBBB", 9, 9, 0, 0, 0)
        + (b"\x2c" + struct.pack("<HHHHB", 0, 0, 9, 9, 0) + b"\x02\x00")
        + (b"\x2c" + struct.pack("<HHHHB", 0, 0, 60_000, 60_000, 0) + b"\x02\x00\x3b"),
    ],
)
def test_a_bomb_is_known_by_its_header(bomb: bytes) -> None:
    with pytest.raises(InvalidMedia) as caught:
        inspect_image(bomb)
    assert caught.value.code == "image_too_large"


def test_a_thin_long_picture_is_fine() -> None:
    assert inspect_image(png(1, 100_000)).height == 100_000


@pytest.mark.parametrize(
    "data",
    [
        b'<svg xmlns="http://www.w3.org/2000/svg"/>',
        b"%PDF-1.7",
        b"II*\0" + bytes(50),
        b"MM\0*" + bytes(50),
        b"BM" + bytes(60),
        b"\0\0\0\x0cjP  \r\n\x87\n",
        b"\0\0\0\x18ftypheic",
        b"SIMPLE  =",
        b"RIFF\x04\0\0\0WAVE",
        b"GIF90a",
        b"hello",
    ],
)
def test_other_formats_are_unsupported(data: bytes) -> None:
    with pytest.raises(UnsupportedMedia):
        inspect_image(data)


@pytest.mark.parametrize("name", FORMATS)
def test_a_truncated_picture_is_refused_or_left_to_the_decoder(name: str) -> None:
    whole = picture(name)
    for size in range(1, len(whole)):
        try:
            header = inspect_image(whole[:size])
        except (InvalidMedia, UnsupportedMedia):
            continue
        assert name == "JPEG"  # its header says nothing of its end
        assert (header.width, header.height) == (20, 10)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        picture("PNG") + b"PK\x03\x04 and an archive",
        picture("WEBP") + b"more",
        b"\x89PNG\r\n\x1a\n" + png_chunk(b"IDAT", b""),
        png(0, 5),
        b"\xff\xd8\xff\xd9",
        b"\xff\xd8\xff\xda" + bytes(20),
        b"GIF89a" + bytes(7) + b"\x3b",
        b"GIF89a" + bytes(7) + b"\x55",
        b"RIFF\x0c\0\0\0WEBPVP8 " + bytes(4),
    ],
)
def test_a_malformed_picture_is_invalid(data: bytes) -> None:
    with pytest.raises(InvalidMedia) as caught:
        inspect_image(data)
    assert caught.value.code == "invalid_image"


def test_the_number_of_hops_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "MAX_HOPS", 50)
    with pytest.raises(InvalidMedia):
        inspect_image(png(1, 1, *[png_chunk(b"tEXt", b"")] * 60))
    blocks = b"\x21\xfe" + b"\x01a" * 60 + b"\0"
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\0\x3b"
    with pytest.raises(InvalidMedia):
        inspect_image(b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0, 0, 0) + blocks + frame)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_bytes_raise_anything_but_typed_errors(data: st.DataObject) -> None:
    whole = bytearray(data.draw(st.sampled_from([picture(name) for name in FORMATS] + [frames("WEBP", 2)])))
    for _ in range(data.draw(st.integers(1, 6))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        inspect_image(bytes(whole))
    except TriptychError as error:
        assert error.http_status in (400, 415)


def test_the_reader_counts_pictures_of_one_request() -> None:
    reader = ImageReader(ImageLimits(max_images=2))
    assert reader(data_url(picture())) == picture()
    reader(data_url(picture("JPEG"), "image/jpg"))
    with pytest.raises(InvalidMedia) as caught:
        reader(data_url(picture()))
    assert caught.value.code == "too_many_images"


def test_the_reader_counts_pixels_of_one_request() -> None:
    reader = ImageReader(ImageLimits(max_total_pixels=300))
    reader(data_url(picture()))
    with pytest.raises(InvalidMedia) as caught:
        reader(data_url(picture()))
    assert caught.value.code == "image_too_large"


def test_the_declared_type_must_be_true_and_allowed() -> None:
    with pytest.raises(InvalidMedia):
        ImageReader()(data_url(picture(), "image/jpeg"))
    with pytest.raises(UnsupportedMedia):
        ImageReader()(data_url(b"<svg/>", "image/svg+xml"))
    with pytest.raises(RequestTooLarge):
        inspect_image(picture(), ImageLimits(max_bytes=10))
