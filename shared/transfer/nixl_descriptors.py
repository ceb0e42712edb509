"""What ``nixl`` says of a read: descriptors of bytes, blocks by index, and runs. Names no library.

Also what a peer says of its regions, checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from shared.errors import TransferError
from shared.transfer.arena import HEADER_BYTES
from shared.transfer.base import Pieces, ReadOp, Sums

_MAX_ADDRESS = 1 << 62
#: Bytes of one transfer, when checksums are wished for: during those of the last, nothing is under way.
_RUN_BYTES = 8 << 20
#: Blocks that a peer may claim to have; their descriptors take memory here.
_MAX_PIECES = 1 << 22


class NixlRegion(Struct, frozen=True):
    name: str
    address: int
    nbytes: int
    pieces: tuple[Pieces, ...] = ()


class Metadata(Struct, frozen=True):
    agent: str
    blob: bytes
    regions: tuple[NixlRegion, ...]


class Run(NamedTuple):
    """A part of a read, as it goes to the library; checksum ``first`` is its first."""

    ops: Sequence[ReadOp]
    first: int


def check_region(region: NixlRegion) -> None:
    """Raises TransferError unless the region is one of memory, and its pieces lie inside."""
    if not (region.nbytes >= HEADER_BYTES and 0 <= region.address <= _MAX_ADDRESS - region.nbytes):
        raise TransferError("malformed transfer metadata")
    for offset, nbytes, num_pieces in region.pieces:
        inside = (
            min(offset, nbytes - 1, num_pieces - 1) >= 0 and offset + nbytes * num_pieces <= region.nbytes
        )
        if not inside or num_pieces > _MAX_PIECES:
            raise TransferError("malformed transfer metadata")


class Indices(NamedTuple):
    """Some pieces of a region: which of its kinds, and which ones of that."""

    kind: int
    which: NDArray[np.int32]


def indices_of(all_pieces: Sequence[Pieces], offsets: Sequence[int], nbytes: int) -> Indices | None:
    """The pieces that have these offsets and sizes; None unless all of them are of one kind."""
    for kind, (first, size, num_pieces) in enumerate(all_pieces):
        end = first + size * num_pieces
        if size == nbytes and all([first <= at < end and not (at - first) % size for at in offsets]):
            return Indices(kind, np.array([(at - first) // size for at in offsets], np.int32))
    return None


def all_descriptors(address: int, pieces: Pieces) -> np.ndarray[Any, Any]:
    """Of every piece of a kind, in order."""
    rows = np.zeros((pieces.num_pieces, 3), np.uint64)
    first = np.uint64(address + pieces.offset)
    rows[:, 0] = first + np.uint64(pieces.nbytes) * np.arange(pieces.num_pieces, dtype=np.uint64)
    rows[:, 1] = pieces.nbytes
    return rows


def descriptors(address: int, offsets_and_sizes: Sequence[tuple[int, int]]) -> np.ndarray[Any, Any]:
    rows = np.zeros((len(offsets_and_sizes), 3), np.uint64)
    rows[:, :2] = offsets_and_sizes
    rows[:, 0] += np.uint64(address)
    return rows


def runs_of(ops: Sequence[ReadOp], sums: Sums | None) -> list[Run]:
    """All in one, or, for checksums, cut: those of one part are taken while the next is under way."""
    if sums is None:
        return [Run(ops, 0)] if ops else []
    runs: list[Run] = []
    part: list[ReadOp] = []
    first = nbytes = 0
    for op in ops:
        part.append(op)
        nbytes += op.nbytes
        if nbytes >= _RUN_BYTES:
            runs.append(Run(part, first))
            part, first, nbytes = [], first + nbytes // sums.unit, 0
    if part:
        runs.append(Run(part, first))
    sums.values = [0] * (first + nbytes // sums.unit)
    return runs
