"""The copying kernel beside numpy: same bytes, nothing beside them, whatever the sizes and alignments."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from shared.kernels import copying
from shared.kernels.copying import BegunSums, copy_and_sum, copy_pieces, sums_of


@pytest.fixture(params=["compiled", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With the compiled kernel, and without a compiler."""
    copying._native.cache_clear()
    if request.param == "numpy":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    elif copying._native() is None:
        pytest.skip("no C compiler")
    assert (copying._native() is None) is (request.param == "numpy")
    yield
    copying._native.cache_clear()


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_pieces_arrive_and_nothing_else_changes(way: None, large: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 300_000 if large else 9_000, 40)
    assert not large or sizes.sum() > 1 << 20
    gaps = random.integers(0, 130, 40)
    targets = np.cumsum(sizes + gaps) - sizes
    source = random.integers(0, 256, 1 << 20, np.uint8)
    starts = random.integers(0, source.size - sizes.max(), 40)
    target = np.full(int((sizes + gaps).sum()) + 200, 9, np.uint8)
    expected = target.copy()
    pieces = list(zip(starts.tolist(), targets.tolist(), sizes.tolist(), strict=True))
    for remote, local, nbytes in pieces:
        expected[local : local + nbytes] = source[remote : remote + nbytes]
    random.shuffle(pieces)
    copy_pieces(target, source, pieces)
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("unit", [1, 64, 240, 241, 256, 1023, 1024, 1025, 1088, 2048, 5000, 65_536])
def test_checksums_are_those_of_the_reference(way: None, unit: int) -> None:
    """Every unit of every piece, in order, whatever the alignment of either side."""
    random = np.random.default_rng(unit)
    source = random.integers(0, 256, 8 * unit + 99, np.uint8)
    target = np.zeros(8 * unit + 99, np.uint8)
    pieces = [(17, 3 * unit + 5, 2 * unit), (2 * unit + 40, 0, 3 * unit), (3, 5 * unit + 77, unit)]
    sums = copy_and_sum(target, source, pieces, unit)
    places = [(local + at, unit) for _, local, nbytes in pieces for at in range(0, nbytes, unit)]
    assert sums == [xxhash.xxh3_64_intdigest(target[at : at + n].tobytes()) for at, n in places]
    assert sums == sums_of(target.data, [(local, nbytes) for _, local, nbytes in pieces], unit)
    for remote, local, nbytes in pieces:
        np.testing.assert_array_equal(target[local : local + nbytes], source[remote : remote + nbytes])


@pytest.mark.parametrize("unit", [100, 4096, 131_072])
def test_checksums_of_much_are_right_whoever_takes_them(way: None, unit: int) -> None:
    """Enough for two threads, again and again, in pieces of several sizes."""
    random = np.random.default_rng(unit)
    sizes = random.integers(1, 5, max(2, (2 << 20) // (3 * unit))) * unit
    order = random.permutation(len(sizes))
    places = np.empty(len(sizes), np.int64)
    places[order] = np.cumsum(sizes[order]) - sizes[order]
    source = random.integers(0, 256, int(sizes.sum()) + 64, np.uint8)
    pieces = list(zip((places + 7).tolist(), places.tolist(), sizes.tolist(), strict=True))
    expected = sums_of(source.data, [(remote, nbytes) for remote, _, nbytes in pieces], unit)
    for _ in range(5):
        target = np.zeros(source.size, np.uint8)
        assert copy_and_sum(target, source, pieces, unit) == expected
        np.testing.assert_array_equal(target[: sizes.sum()], source[7 : 7 + sizes.sum()])


@pytest.mark.parametrize("unit", [64, 300, 65_536])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_begun_checksums_can_be_had_in_any_order_or_not_at_all(
    way: None, unit: int, order: tuple[int, ...]
) -> None:
    target = np.random.default_rng(unit).integers(0, 256, 20 * unit, np.uint8)
    pieces = [[(4 * i * unit + 3, 3 * unit), (17 * unit, unit), (i, 2 * unit)] for i in range(4)]
    begun = [BegunSums(target, some, unit) for some in pieces]
    for _ in range(3):
        BegunSums(target, pieces[0], unit)
    for i in order:
        found = begun[i].finish()
        assert found == sums_of(target.data, pieces[i], unit) == begun[i].finish()


def test_nothing_is_read_through_begun_checksums_once_they_are_finished(way: None) -> None:
    target = np.zeros(1 << 20, np.uint8)
    begun = BegunSums(target, [(0, 1 << 20)], 1 << 10)
    before = begun.finish()
    target[:] = 1
    assert begun.finish() == before == [xxhash.xxh3_64_intdigest(bytes(1 << 10))] * (1 << 10)


@pytest.mark.parametrize("unit", [0, -1, 3])
def test_pieces_that_are_not_whole_units_are_refused(way: None, unit: int) -> None:
    target = np.zeros(8, np.uint8)
    with pytest.raises(ValueError, match="not made of"):
        copy_and_sum(target, np.ones(8, np.uint8), [(0, 0, 8)], unit)
    assert not target.any()


def test_no_pieces_is_no_copy(way: None) -> None:
    target = np.zeros(8, np.uint8)
    copy_pieces(target, np.ones(8, np.uint8), [])
    assert not target.any()


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
@pytest.mark.parametrize("flags", [["-march=native"], ["-Wno-psabi"]])
def test_the_source_compiles_without_warnings(flags: list[str]) -> None:
    source = Path(copying.__file__).with_name("native") / "copying.c"
    command = ["gcc", "-std=gnu11", *flags, "-Wall", "-Wextra", "-Werror", "-fsyntax-only", str(source)]
    subprocess.run(command, check=True)
