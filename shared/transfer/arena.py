"""One memory file that holds a process's blocks, with the header and generations that fence it.

Layout, all little-endian: a header page (magic, version, incarnation, epoch, nonce), one uint64
generation per block of each group, then, page-aligned, the blocks of group 0, group 1, ... A block
is one contiguous extent. The file is anonymous (a killed process leaves nothing behind), cannot
be resized, and no later mapping of it can write. An arena that a keeper holds for the owner's next life
can be mapped once more by that one, and has a ledger after its blocks. Owns the format; not who may
reuse a block, nor what a ledger says.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
import stat
import struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.clock import Entropy, SystemEntropy
from shared.errors import ConfigError, PeerLost
from shared.types.transfer import RegionInfo

_MAGIC = b"TRPARENA"
_VERSION = 1
# magic, version, incarnation, epoch, nonce
_HEADER = struct.Struct("<8sQ16sQ16s")
_EPOCH_AT = 32
#: Bytes of the header that a reader needs.
HEADER_BYTES = _HEADER.size
_PAGE = mmap.PAGESIZE

_F_SEAL_FUTURE_WRITE = 0x0010  # linux/fcntl.h; the module lacks the name
#: A file with these seals cannot shrink under a reader (SIGBUS).
READER_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
#: And one with these cannot be mapped writable again either.
SEALS = READER_SEALS | _F_SEAL_FUTURE_WRITE


class Header(NamedTuple):
    """What an arena says about its owner. ``incarnation`` and ``nonce`` are 32 hex digits."""

    incarnation: str
    epoch: int
    nonce: str


def parse_header(data: memoryview | bytes) -> Header:
    """Read a header. Raises PeerLost when these bytes are not one of this version."""
    if len(data) < HEADER_BYTES:
        raise PeerLost("the arena of the peer is too short")
    magic, version, incarnation, epoch, nonce = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise PeerLost("the memory of the peer is not an arena of this version")
    return Header(incarnation.hex(), epoch, nonce.hex())


def _page_up(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def plan_region(
    name: str, num_blocks: tuple[int, ...], extent_bytes: tuple[int, ...], ledger_bytes: int = 0
) -> RegionInfo:
    """Lay an arena out; the ledger is what is left behind the blocks. Raises ConfigError on an impossible
    geometry."""
    if not num_blocks or len(num_blocks) != len(extent_bytes) or min(*num_blocks, *extent_bytes) <= 0:
        raise ConfigError(f"arena {name!r}: need one positive block count and extent a group")
    table_sizes = [8 * n for n in num_blocks]
    generation_offsets = [_PAGE + sum(table_sizes[:g]) for g in range(len(num_blocks))]
    sizes = [_page_up(n * extent) for n, extent in zip(num_blocks, extent_bytes, strict=True)]
    first = _page_up(_PAGE + sum(table_sizes))
    data_offsets = tuple(itertools.accumulate(sizes[:-1], initial=first))
    return RegionInfo(
        name=name,
        nbytes=first + sum(sizes) + _page_up(ledger_bytes),
        num_blocks=num_blocks,
        extent_bytes=extent_bytes,
        generation_offsets=tuple(generation_offsets),
        data_offsets=data_offsets,
    )


class Arena:
    """The owner's read-write side. Pages cost memory only once touched.

    Views handed out stay valid until ``close``. Not locked: the engine writes blocks and
    generations, peers read them at any time, and the protocol of ``handoff`` notices a race.
    """

    def __init__(self, info: RegionInfo, fd: int, mapped: mmap.mmap) -> None:
        self.info = info
        self.fd = fd
        self._mapped = mapped
        self.buffer = memoryview(mapped)

    @classmethod
    def create(
        cls,
        name: str,
        num_blocks: tuple[int, ...],
        extent_bytes: tuple[int, ...],
        incarnation: str,
        epoch: int = 0,
        *,
        ledger_bytes: int | None = None,
        entropy: Entropy | None = None,
    ) -> Arena:
        """Allocate; ``incarnation`` is 32 hex digits. With ``ledger_bytes`` it is one to be kept. Raises
        ConfigError on an impossible geometry, OSError when the system has no memory files."""
        info = plan_region(name, tuple(num_blocks), tuple(extent_bytes), ledger_bytes or 0)
        fd = os.memfd_create(f"triptych-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, info.nbytes)
            mapped = mmap.mmap(fd, info.nbytes)
            if ledger_bytes is not None:
                os.fchmod(fd, stat.S_IRUSR)  # whoever opens it anew may read it
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS if ledger_bytes is None else READER_SEALS)
        except BaseException:
            os.close(fd)
            raise
        arena = cls(info, fd, mapped)
        arena._begin_life(incarnation, epoch, entropy)
        return arena

    @classmethod
    def adopt(cls, fd: int, info: RegionInfo, incarnation: str, *, entropy: Entropy | None = None) -> Arena:
        """Map a kept arena again, for the owner's next life: whoever knew the one before finds nothing valid
        from now on. Takes ``fd`` over. Raises ConfigError, and closes it, when it is not an arena of this
        layout."""
        try:
            if os.fstat(fd).st_size != info.nbytes or fcntl.fcntl(fd, fcntl.F_GET_SEALS) != READER_SEALS:
                raise ConfigError(f"the kept arena {info.name!r} is of another size or not sealed")
            mapped = mmap.mmap(fd, info.nbytes)
            before = parse_header(mapped[:HEADER_BYTES])
        except (OSError, PeerLost, ConfigError) as error:
            os.close(fd)
            raise ConfigError(f"the kept arena {info.name!r} cannot be used") from error
        arena = cls(info, fd, mapped)
        arena._begin_life(incarnation, before.epoch, entropy)
        return arena

    def _begin_life(self, incarnation: str, epoch: int, entropy: Entropy | None) -> None:
        nonce = (entropy or SystemEntropy()).hex_id()
        header = _HEADER.pack(_MAGIC, _VERSION, bytes.fromhex(incarnation), epoch, bytes.fromhex(nonce))
        self._mapped[: len(header)] = header

    @property
    def epoch(self) -> int:
        return parse_header(self.buffer[:HEADER_BYTES]).epoch

    def set_epoch(self, epoch: int) -> None:
        """Fence: readers that hold an older epoch find nothing valid from now on."""
        np.frombuffer(self.buffer, "<u8", 1, _EPOCH_AT)[0] = epoch

    def generations(self, group: int) -> NDArray[np.uint64]:
        """Writable view: one generation a block."""
        return np.frombuffer(
            self.buffer, np.uint64, self.info.num_blocks[group], self.info.generation_offsets[group]
        )

    def data(self, group: int) -> memoryview:
        """Writable bytes of all blocks of a group, in order of block id."""
        first = self.info.data_offsets[group]
        return self.buffer[first : first + self.info.num_blocks[group] * self.info.extent_bytes[group]]

    def block(self, group: int, block_id: int) -> memoryview:
        """Writable bytes of one block."""
        extent = self.info.extent_bytes[group]
        return self.data(group)[block_id * extent : (block_id + 1) * extent]

    def ledger(self) -> memoryview:
        """Writable bytes behind the blocks; empty when there is no ledger."""
        last = len(self.info.num_blocks) - 1
        first = self.info.data_offsets[last] + _page_up(
            self.info.num_blocks[last] * self.info.extent_bytes[last]
        )
        return self.buffer[first : self.info.nbytes]

    def close(self) -> None:
        """Give the memory back; views that are still held keep it alive. Calling it twice is safe."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        with contextlib.suppress(BufferError):  # somebody's view: unmapped when that one goes
            self.buffer.release()
            self._mapped.close()

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
