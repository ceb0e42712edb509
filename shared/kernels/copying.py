"""Copies many pieces between two buffers at the speed of memory, and takes checksums on the way.

Torch-free; owns no memory. Compiled (``native/copying.c``), large copies go past the cache, faster than
memcpy, and a checksum costs little, because it is taken while the cache has the bytes. One thread for all of
a process helps with checksums, if there is a core for it. Where nothing can be compiled, numpy and xxhash do
the same.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import shutil
import subprocess
from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from shared.kernels.library import build, cache_dir

log = logging.getLogger(__name__)

Piece = tuple[int, int, int]

#: Up to so many bytes xxh3_64 is another algorithm.
_SHORT = 240
#: Up to so many pieces, and bytes, a call of the kernel is not worth its preparation.
_FEW, _LITTLE = 4, 1 << 16


@functools.cache
def _native() -> ctypes.CDLL | None:
    """The compiled kernel, built if need be; None where that is impossible."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    try:
        if compiler is None:
            raise FileNotFoundError("no C compiler")
        library = ctypes.CDLL(str(build(compiler, cache_dir(), "copying")))
    except (OSError, subprocess.SubprocessError) as error:
        log.info("memory is copied by numpy: %s", error)
        return None
    address, count = ctypes.c_void_p, ctypes.c_int64
    library.triptych_copy.argtypes = (address, address, address, count)
    library.triptych_copy_sums.argtypes = (address, address, address, count, address, count)
    library.triptych_sums_begin.argtypes = (address, *library.triptych_copy_sums.argtypes)
    library.triptych_sums_end.argtypes = (address,)
    library.triptych_work_bytes.restype = count
    for function in ("copy", "copy_sums", "sums_end"):
        getattr(library, f"triptych_{function}").restype = None
    # Without a second core, a helper would only take ours.
    if len(os.sched_getaffinity(0)) > 1:
        library.triptych_helper()
    return library


def prepare_copies() -> None:
    """Build what the first copy would have to wait for."""
    _native()


def copy_pieces(target: NDArray[np.uint8], source: NDArray[np.uint8], pieces: Sequence[Piece]) -> None:
    """For each (offset in ``source``, offset in ``target``, bytes): copy. Releases the interpreter lock. Both
    are contiguous, and the pieces must lie inside either and not overlap: the caller has checked that."""
    library = _native()
    if library is None or (len(pieces) <= _FEW and sum([nbytes for _, _, nbytes in pieces]) <= _LITTLE):
        for remote, local, nbytes in pieces:
            target[local : local + nbytes] = source[remote : remote + nbytes]
        return
    rows = np.array(pieces, np.int64).reshape(-1, 3)
    library.triptych_copy(target.ctypes.data, source.ctypes.data, rows.ctypes.data, len(rows))


def copy_and_sum(
    target: NDArray[np.uint8], source: NDArray[np.uint8], pieces: Sequence[Piece], unit: int
) -> list[int]:
    """``copy_pieces``; returns the checksum (xxh3_64) of every ``unit`` bytes of each piece, in order, taken
    from ``target``. Raises ValueError, before anything is copied, unless each piece is whole units."""
    if unit <= 0 or any([nbytes % unit for _, _, nbytes in pieces]):
        raise ValueError(f"the pieces are not made of {unit} bytes")
    library = _native()
    if library is None or unit <= _SHORT:
        copy_pieces(target, source, pieces)
        return sums_of(target.data, [(local, nbytes) for _, local, nbytes in pieces], unit)
    rows = np.array(pieces, np.int64).reshape(-1, 3)
    sums = np.empty(int(rows[:, 2].sum()) // unit, np.uint64)
    library.triptych_copy_sums(
        target.ctypes.data, source.ctypes.data, rows.ctypes.data, unit, sums.ctypes.data, len(sums)
    )
    return sums.tolist()


def sums_of(buffer: memoryview, pieces: Sequence[tuple[int, int]], unit: int) -> list[int]:
    """The checksum (xxh3_64) of every ``unit`` bytes of each (offset, bytes) of ``buffer``, in order."""
    digest = xxhash.xxh3_64_intdigest
    return [
        digest(buffer[at : at + unit])
        for first, nbytes in pieces
        for at in range(first, first + nbytes, unit)
    ]


class BegunSums:
    """``sums_of``, begun at once by another thread; without the compiled kernel, taken at once. ``target``
    is read until ``finish``, or until this object goes."""

    def __init__(self, target: NDArray[np.uint8], pieces: Sequence[tuple[int, int]], unit: int) -> None:
        self._under_way: ctypes.CDLL | None = None
        library = _native()
        if library is None or unit <= _SHORT:
            self._found = sums_of(target.data, pieces, unit)
            return
        rows = np.array([(0, first, nbytes) for first, nbytes in pieces], np.int64).reshape(-1, 3)
        self._sums = np.empty(int(rows[:, 2].sum()) // unit, np.uint64)
        self._work = np.empty(library.triptych_work_bytes(), np.uint8)
        self._read = (target, rows)
        places = (target.ctypes.data, None, rows.ctypes.data, unit, self._sums.ctypes.data, len(self._sums))
        begun = library.triptych_sums_begin(self._work.ctypes.data, *places)
        self._under_way = library
        if not begun:
            self._end()

    def finish(self) -> list[int]:
        """The checksums; does what is left. Calling it twice is safe."""
        self._end()
        return self._found

    def _end(self) -> None:
        library, self._under_way = self._under_way, None
        if library is not None:
            library.triptych_sums_end(self._work.ctypes.data)
            self._found = self._sums.tolist()

    __del__ = _end
