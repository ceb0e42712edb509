"""Spoiled files of records: each is refused, and none is what it was."""

from __future__ import annotations

import random

import pytest

from shared.tiering.record import CorruptRecord, decode_header, header_length, verify
from tests.chaos.mutations import BEHIND_THE_HEADER, WAYS, Way, spoiled
from tests.contract.tiering.harness import Stored, make


def file_of(stored: Stored) -> bytes:
    return stored.item.header + bytes(stored.item.payload)


def accept(data: bytes, wanted: Stored) -> None:
    """Raises CorruptRecord."""
    header = data[: header_length(data)]
    record = wanted.record
    payload = memoryview(data)[len(header) :]
    verify(decode_header(header), payload, record.content, record.identity, record.layout)


def test_what_is_not_spoiled_is_accepted() -> None:
    accept(file_of(make(1)), make(1))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_way_makes_a_file_that_is_refused(way: Way) -> None:
    one, other = make(1), make(2)
    rng = random.Random(way.__name__)
    for _ in range(20):
        data = spoiled((way,), file_of(one), file_of(other), rng)
        assert data != file_of(one)
        with pytest.raises(CorruptRecord):
            accept(data, one)


@pytest.mark.parametrize("way", BEHIND_THE_HEADER, ids=lambda way: way.__name__)
def test_some_ways_leave_the_header_as_it_was(way: Way) -> None:
    one, other = make(1), make(2)
    data = spoiled((way,), file_of(one), file_of(other), random.Random(3))
    length = header_length(data)
    assert data[:length] == one.item.header
    assert data[length:] != bytes(one.item.payload)


def test_what_comes_out_is_a_function_of_what_goes_in() -> None:
    one, other = file_of(make(1)), file_of(make(2))
    first = [spoiled(WAYS, one, other, random.Random(n)) for n in range(40)]
    assert first == [spoiled(WAYS, one, other, random.Random(n)) for n in range(40)]
