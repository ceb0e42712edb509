"""The identity of a full block: a SHA-256 chain over everything that its KV bytes depend on.

Owns the hash and its field order. Owns no blocks. Every field is length-prefixed, so two different
inputs never serialise to the same bytes. Each hash covers its parent's, so one hash names a whole prefix.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shared.types.identity import IdentityKey
from shared.types.request import MediaItem

#: Media inside one block: (mm_hash, offset of the item minus start of the block), in prompt order.
BlockMedia = tuple[tuple[str, int], ...]

_U32 = struct.Struct("<I")
_I64 = struct.Struct("<q")


class HashedBlock(NamedTuple):
    """A full block of a prompt: its hash, and what the hash was made of."""

    block_hash: bytes
    parent: bytes
    token_ids: tuple[int, ...]
    media: BlockMedia


def media_by_block(media: Sequence[MediaItem], block_size: int) -> dict[int, BlockMedia]:
    """For each block index that media overlap: what ``BlockHasher.chain`` wants to know of them."""
    found: dict[int, list[tuple[str, int]]] = {}
    for item in sorted(media, key=lambda m: m.offset):
        stop = item.offset + item.num_tokens if item.num_tokens > 0 else 0
        for index in range(item.offset // block_size, -(-stop // block_size)):
            found.setdefault(index, []).append((item.mm_hash, item.offset - index * block_size))
    return {index: tuple(items) for index, items in found.items()}


class BlockHasher:
    """Hashes blocks of one model identity. Immutable; any thread.

    ``bits`` < 256 cuts block hashes short, to prove that a collision is never taken for a hit. The root
    stays whole: it stands for fields (salt, adapter) that are not compared otherwise.
    """

    def __init__(self, identity: IdentityKey, block_size: int, *, bits: int = 256) -> None:
        if block_size < 1:
            raise ValueError("block_size must be positive")
        if not 1 <= bits <= 256:
            raise ValueError("bits must be in 1..256")
        self.block_size = block_size
        self._identity = tuple(str(getattr(identity, name)) for name in identity.__struct_fields__)
        self._tokens = struct.Struct(f"<{block_size + 1}I")
        self._num_bytes = -(-bits // 8)
        self._last_mask = 0xFF & (0xFF << (-bits % 8))

    def root(self, cache_salt: str, adapter: str) -> bytes:
        """The parent of a sequence's first block: 32 bytes, never cut."""
        digest = hashlib.sha256(b"root")
        for field in (*self._identity, cache_salt, adapter):
            digest.update(_prefixed(field.encode()))
        return digest.digest()

    def chain(self, parent: bytes, token_ids: Sequence[int], media: Sequence[tuple[str, int]]) -> bytes:
        """Hash of one full block after ``parent`` (a root or a block hash).

        Raises ValueError unless there are exactly ``block_size`` ids, each in 0 .. 2**32 - 1.
        """
        try:
            parts = [b"block", _prefixed(parent), self._tokens.pack(len(token_ids), *token_ids)]
        except struct.error as err:
            raise ValueError(f"a block hash covers {self.block_size} token ids of 32 bits") from err
        for mm_hash, offset in media:
            parts += (_prefixed(mm_hash.encode()), _I64.pack(offset))
        return self._cut(hashlib.sha256(b"".join(parts)).digest())

    def prompt(
        self,
        token_ids: Sequence[int],
        media: Sequence[MediaItem] = (),
        cache_salt: str = "",
        adapter: str = "",
    ) -> Iterator[HashedBlock]:
        """The full blocks of a prompt from the front, each hashed when asked for."""
        size = self.block_size
        items = media_by_block(media, size)
        parent = self.root(cache_salt, adapter)
        for index in range(len(token_ids) // size):
            ids = tuple(token_ids[index * size : (index + 1) * size])
            inside = items.get(index, ())
            block_hash = self.chain(parent, ids, inside)
            yield HashedBlock(block_hash, parent, ids, inside)
            parent = block_hash

    def _cut(self, digest: bytes) -> bytes:
        if self._num_bytes == 32 and self._last_mask == 0xFF:
            return digest
        head, last = digest[: self._num_bytes - 1], digest[self._num_bytes - 1]
        return head + bytes((last & self._last_mask,))


def _prefixed(data: bytes) -> bytes:
    return _U32.pack(len(data)) + data
