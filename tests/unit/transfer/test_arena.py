"""An arena: its layout, its fence, and what a reader can never do to it."""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os

import pytest

from shared.clock import CountingEntropy
from shared.errors import ConfigError, PeerLost
from shared.transfer.arena import HEADER_BYTES, SEALS, Arena, parse_header, plan_region

INCARNATION = "ab" * 16


def make() -> Arena:
    return Arena.create("kv", (5, 3), (100, 5000), INCARNATION, 7, entropy=CountingEntropy())


def test_tables_and_blocks_do_not_overlap_and_data_is_page_aligned() -> None:
    info = plan_region("kv", (5, 700), (100, 5000))
    spans = [
        *((at, at + 8 * n) for at, n in zip(info.generation_offsets, info.num_blocks, strict=True)),
        *(
            (at, at + n * e)
            for at, n, e in zip(info.data_offsets, info.num_blocks, info.extent_bytes, strict=True)
        ),
    ]
    ordered = sorted([(0, HEADER_BYTES), *spans, (info.nbytes, info.nbytes)])
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ordered))
    assert all(at % mmap.PAGESIZE == 0 for at in info.data_offsets)
    assert all(at % 8 == 0 for at in info.generation_offsets)


@pytest.mark.parametrize(
    ("num_blocks", "extents"), [((), ()), ((1,), (1, 2)), ((0,), (8,)), ((1,), (0,)), ((-1,), (8,))]
)
def test_an_impossible_geometry_is_refused(num_blocks: tuple[int, ...], extents: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError):
        Arena.create("kv", num_blocks, extents, INCARNATION)


def test_blocks_and_generations_are_views_of_one_file() -> None:
    with make() as arena:
        arena.block(1, 2)[:] = b"x" * 5000
        arena.generations(0)[4] = 9
        data = os.pread(arena.fd, arena.info.nbytes, 0)
        at = arena.info.data_offsets[1] + 2 * 5000
        assert data[at : at + 5000] == b"x" * 5000
        assert data[arena.info.generation_offsets[0] + 32] == 9
        assert bytes(arena.data(1)[2 * 5000 :]) == b"x" * 5000


def test_the_header_says_who_and_when() -> None:
    with make() as arena:
        header = parse_header(arena.buffer[:HEADER_BYTES])
        assert header == (INCARNATION, 7, f"{1:032x}")
        arena.set_epoch(1 << 63)
        assert arena.epoch == 1 << 63
        assert parse_header(arena.buffer[:HEADER_BYTES])[::2] == header[::2]


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b"?" + b[1:], lambda b: b[:8] + b"\2" + b[9:]]
)
def test_a_damaged_header_is_no_header(damage: object) -> None:
    with make() as arena, pytest.raises(PeerLost):
        parse_header(damage(bytes(arena.buffer[:HEADER_BYTES])))  # type: ignore[operator]


def test_nobody_can_write_or_resize_it_from_outside() -> None:
    with make() as arena:
        assert fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS) & SEALS == SEALS
        fd = os.open(f"/proc/self/fd/{arena.fd}", os.O_RDWR)
        try:
            for attempt in (
                lambda: mmap.mmap(fd, arena.info.nbytes),
                lambda: os.pwrite(fd, b"x", 0),
                lambda: os.ftruncate(fd, 0),
                lambda: os.ftruncate(fd, arena.info.nbytes + 1),
            ):
                with pytest.raises(OSError, match="not permitted"):
                    attempt()
        finally:
            os.close(fd)


def test_views_outlive_close_and_close_is_idempotent() -> None:
    arena = make()
    generations = arena.generations(0)
    generations[0] = 3
    arena.close()
    arena.close()
    assert generations[0] == 3
    assert arena.fd == -1
