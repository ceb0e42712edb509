"""Checksums: what they cover, and that every bit counts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.kernels.checksum import checksum, head_checksums, packed_checksum
from shared.types.identity import LayoutSpec


@given(st.binary(min_size=1, max_size=300), st.lists(st.integers(0, 300), max_size=5))
def test_packed_parts_are_one_buffer_wherever_they_are_cut(data: bytes, cuts: list[int]) -> None:
    borders = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    parts = [data[a:b] for a, b in itertools.pairwise(borders)]
    assert packed_checksum(parts) == checksum(data)


@given(st.integers(1, 4), st.integers(1, 40), st.data())
def test_a_flipped_bit_changes_its_head_alone(heads: int, head_bytes: int, data: st.DataObject) -> None:
    extent = bytearray(data.draw(st.binary(min_size=heads * head_bytes, max_size=heads * head_bytes)))
    before = head_checksums(memoryview(extent), heads)
    assert before == tuple(
        checksum(bytes(extent[h * head_bytes : (h + 1) * head_bytes])) for h in range(heads)
    )
    bit = data.draw(st.integers(0, 8 * len(extent) - 1))
    extent[bit // 8] ^= 1 << bit % 8
    after = head_checksums(memoryview(extent), heads)
    assert [h for h in range(heads) if before[h] != after[h]] == [bit // 8 // head_bytes]


def test_an_extent_of_wider_items_is_bytes_too() -> None:
    data = bytes(range(64))
    assert head_checksums(memoryview(data).cast("I"), 2) == head_checksums(memoryview(data), 2)


@pytest.mark.parametrize(("nbytes", "heads"), [(10, 3), (10, 0), (10, -1), (0, 1)])
def test_an_extent_that_does_not_divide_is_refused(nbytes: int, heads: int) -> None:
    with pytest.raises(ValueError, match="divide"):
        head_checksums(memoryview(bytes(nbytes)), heads)


def test_the_algorithm_goes_by_the_name_in_the_layout() -> None:
    name = LayoutSpec((), 16).checksum
    assert packed_checksum([b"abc"], name) == checksum(b"abc")
    with pytest.raises(ConfigError, match=name):
        packed_checksum([b"abc"], "crc0")
