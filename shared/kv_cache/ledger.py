"""What memory that outlives its owner says about its blocks: enough to find the committed ones again.

Owns the records of one group in a buffer; not the blocks, and not the buffer. A record stands for a
published block with checksums, and names the generation it was written for: a block that was handed
out again since, or a record that was half written when the owner died, reads as nothing.

Layout: one fixed-size slot a block: uint64 checksum (xxh3_64) over the rest, uint64 generation, uint32
length, then that many bytes of msgpack.
"""

from __future__ import annotations

import struct

import msgspec
from msgspec import Struct

from shared.kernels.checksum import checksum
from shared.kv_cache.block_hash import BlockMedia

_HEAD = struct.Struct("<QQI")
_MAX_MEDIA = 2
_MEDIA_BYTES = 96


class LedgerEntry(Struct, frozen=True, array_like=True):
    """What a block holds (see ``BlockKey``), and one checksum a kv_head of its bytes."""

    block_hash: bytes
    parent: bytes
    token_ids: tuple[int, ...]
    media: BlockMedia
    checksums: tuple[int, ...]


_decoder = msgspec.msgpack.Decoder(LedgerEntry)


class NullLedger:
    """The memory ends with its owner: nothing is written down."""

    def write(self, block_id: int, generation: int, entry: LedgerEntry) -> None:
        """A block became findable, with these contents."""

    def clear(self, block_id: int) -> None:
        """A block is found no more."""


class Ledger(NullLedger):
    """Slots of ``slot_bytes`` (see ``slot_bytes``) for the blocks of one group."""

    def __init__(self, buffer: memoryview, num_blocks: int, nbytes_per_slot: int) -> None:
        if buffer.nbytes < num_blocks * nbytes_per_slot:
            raise ValueError("the ledger is too small for its blocks")
        self._buffer = buffer
        self._num_blocks = num_blocks
        self._slot_bytes = nbytes_per_slot

    def write(self, block_id: int, generation: int, entry: LedgerEntry) -> None:
        """See NullLedger. A block whose record is too long (many media items) is not written down."""
        data = msgspec.msgpack.encode(entry)
        if _HEAD.size + len(data) > self._slot_bytes:
            self.clear(block_id)
            return
        slot = self._slot(block_id)
        body = struct.pack("<QI", generation, len(data)) + data
        slot[8 : 8 + len(body)] = body
        slot[:8] = checksum(body).to_bytes(8, "little")

    def clear(self, block_id: int) -> None:
        self._slot(block_id)[: _HEAD.size] = bytes(_HEAD.size)

    def read(self, block_id: int, generation: int) -> LedgerEntry | None:
        """The record of a block, if it is whole and of this generation."""
        slot = self._slot(block_id)
        seen, written_for, length = _HEAD.unpack_from(slot)
        if not length or length > self._slot_bytes - _HEAD.size or written_for != generation:
            return None
        if checksum(slot[8 : _HEAD.size + length]) != seen:
            return None
        try:
            return _decoder.decode(slot[_HEAD.size : _HEAD.size + length])
        except msgspec.DecodeError:
            return None

    def _slot(self, block_id: int) -> memoryview:
        if not 0 <= block_id < self._num_blocks:
            raise IndexError("no such block")
        return self._buffer[block_id * self._slot_bytes : (block_id + 1) * self._slot_bytes]


def slot_bytes(block_size: int, num_heads: int) -> int:
    """Bytes for the record of a block of ``block_size`` tokens with a few media items, in lines of 64."""
    most = _HEAD.size + 2 * 34 + 5 * block_size + 9 * num_heads + _MAX_MEDIA * _MEDIA_BYTES + 32
    return -(-most // 64) * 64
