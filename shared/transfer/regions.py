"""Registered regions and bounds, as every backend needs them; owns no memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.errors import TransferError
from shared.transfer.base import ReadOp

MAX_METADATA_BYTES = 64 << 10
MAX_NOTIFY_BYTES = 512

_Metadata = TypeVar("_Metadata", bound=msgspec.Struct)


class Region(NamedTuple):
    """One registered region of this process: writable bytes, and the same as a uint8 array."""

    name: str
    buffer: memoryview
    bytes_np: NDArray[np.uint8]
    fd: int

    @classmethod
    def of(cls, name: str, buffer: memoryview, fd: int) -> Region:
        return cls(name, buffer, np.frombuffer(buffer, np.uint8), fd)

    @property
    def nbytes(self) -> int:
        return self.bytes_np.size


def parse_metadata(metadata: bytes, kind: type[_Metadata]) -> _Metadata:
    """Decode what a peer's ``describe`` said. Raises TransferError on anything else."""
    if len(metadata) > MAX_METADATA_BYTES:
        raise TransferError("transfer metadata is too long")
    try:
        return msgspec.msgpack.decode(metadata, type=kind)
    except (msgspec.DecodeError, ValueError) as error:
        raise TransferError("malformed transfer metadata") from error


def local_region(regions: Mapping[str, Region], name: str) -> Region:
    """A registered region. Raises TransferError when there is none of that name."""
    try:
        return regions[name]
    except KeyError:
        raise TransferError(f"no region {name!r} is registered here") from None


def check_ops(ops: Sequence[ReadOp], remote_bytes: int, local_bytes: int) -> None:
    """Raises TransferError unless every op lies inside both regions."""
    for remote, local, nbytes in ops:
        if not (0 <= remote <= remote_bytes - nbytes and 0 <= local <= local_bytes - nbytes and nbytes > 0):
            raise TransferError("a read lies outside its region")


def check_payload(payload: bytes) -> None:
    """Raises TransferError when a notification is too long."""
    if len(payload) > MAX_NOTIFY_BYTES:
        raise TransferError("a notification is too long")


def coalesce(ops: Sequence[ReadOp]) -> list[ReadOp]:
    """Join neighbours that are consecutive on both sides; keeps order, copies the same bytes."""
    joined: list[ReadOp] = []
    for op in ops:
        if joined:
            last = joined[-1]
            if (
                last.remote_offset + last.nbytes == op.remote_offset
                and last.local_offset + last.nbytes == op.local_offset
            ):
                joined[-1] = ReadOp(last.remote_offset, last.local_offset, last.nbytes + op.nbytes)
                continue
        joined.append(op)
    return joined
