"""The identity of a full block: a SHA-256 chain over everything that its KV bytes depend on.

Owns the hash and its field order. Owns no blocks. Every field is length-prefixed, so two different
inputs never serialise to the same bytes. Each digest covers its parent, the digest of all that is before, so
a block's parent and its own content together name a whole prefix.
"""

from __future__ import annotations

import functools
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
_HASH = hashlib.sha256


class HashedBlock(NamedTuple):
    """A full block of a prompt: its hash, and what the hash was made of. ``parent``: the root, or the digest
    of the block before, whole even where hashes are cut."""

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


@functools.lru_cache(maxsize=64)
def _ids(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}I")


def block_content(parent: bytes, token_ids: Sequence[int], media: Sequence[tuple[str, int]]) -> bytes:
    """The bytes that a block's hash is the digest of: two blocks are equal when these are.

    Raises ValueError for an id outside 0 .. 2**32 - 1.
    """
    num_tokens = len(token_ids)
    try:
        packed = _ids(num_tokens + 1).pack(num_tokens, *token_ids)
    except struct.error as err:
        raise ValueError(f"{num_tokens} token ids, of which one is not of 32 bits") from err
    content = b"block" + _U32.pack(len(parent)) + parent + packed
    return content + _media_content(media) if media else content


def _media_content(media: Sequence[tuple[str, int]]) -> bytes:
    return b"".join(_prefixed(mm_hash.encode()) + _I64.pack(offset) for mm_hash, offset in media)


class BlockHasher:
    """Hashes blocks of one model identity. Immutable; any thread.

    ``bits`` < 256 cuts the hashes that blocks are found by, to prove that a collision is never taken for a
    hit. Parents stay whole: they stand for what is not compared otherwise (salt, adapter, blocks before).
    """

    def __init__(self, identity: IdentityKey, block_size: int, *, bits: int = 256) -> None:
        if block_size < 1:
            raise ValueError("block_size must be positive")
        if not 1 <= bits <= 256:
            raise ValueError("bits must be in 1..256")
        self.block_size = block_size
        self._identity = tuple(str(getattr(identity, name)) for name in identity.__struct_fields__)
        self._num_bytes = -(-bits // 8)
        self._last_mask = 0xFF & (0xFF << (-bits % 8))
        self._is_cut = bits < 256

    def root(self, cache_salt: str, adapter: str) -> bytes:
        """The parent of a sequence's first block: 32 bytes, never cut."""
        digest = hashlib.sha256(b"root")
        for field in (*self._identity, cache_salt, adapter):
            digest.update(_prefixed(field.encode()))
        return digest.digest()

    def chain(self, parent: bytes, token_ids: Sequence[int], media: Sequence[tuple[str, int]]) -> bytes:
        """Hash of one full block after ``parent`` (a root or a ``digest``).

        Raises ValueError unless there are exactly ``block_size`` ids, each in 0 .. 2**32 - 1.
        """
        if len(token_ids) != self.block_size:
            raise ValueError(f"a block hash covers {self.block_size} token ids")
        return self._cut(_HASH(block_content(parent, token_ids, media)).digest())

    def digest(
        self, block_hash: bytes, parent: bytes, token_ids: Sequence[int], media: Sequence[tuple[str, int]]
    ) -> bytes:
        """The parent of what comes after a block with this hash and content, which is its whole hash."""
        return _HASH(block_content(parent, token_ids, media)).digest() if self._is_cut else block_hash

    def prompt(
        self,
        token_ids: Sequence[int],
        media: Sequence[MediaItem] = (),
        cache_salt: str = "",
        adapter: str = "",
    ) -> Iterator[HashedBlock]:
        """The full blocks of a prompt from the front."""
        size = self.block_size
        hashes, _ = self.contents(token_ids, media, cache_salt, adapter)
        items = media_by_block(media, size)
        parent = self.root(cache_salt, adapter)
        for index, block_hash in enumerate(hashes):
            ids = tuple(token_ids[index * size : (index + 1) * size])
            block = HashedBlock(block_hash, parent, ids, items.get(index, ()))
            yield block
            parent = self.digest(*block)

    def contents(
        self,
        token_ids: Sequence[int],
        media: Sequence[MediaItem] = (),
        cache_salt: str = "",
        adapter: str = "",
    ) -> tuple[list[bytes], list[bytes]]:
        """As ``prompt``, but the blocks' hashes and their contents (``block_content``): what an index needs,
        for a third of the time. Raises ValueError for an id outside of 32 bits."""
        size, items = self.block_size, media_by_block(media, self.block_size)
        num_blocks = len(token_ids) // size
        try:
            packed = _ids(num_blocks * size).pack(*token_ids[: num_blocks * size])
        except struct.error as err:
            raise ValueError("token ids have 32 bits") from err
        parent = self.root(cache_salt, adapter)
        head, count, step = b"block" + _U32.pack(len(parent)), _U32.pack(size), 4 * size
        hashes: list[bytes] = []
        contents: list[bytes] = []
        for at in range(0, len(packed), step):
            content = head + parent + count + packed[at : at + step]
            if items:
                content += _media_content(items.get(at // step, ()))
            parent = _HASH(content).digest()
            hashes.append(parent)
            contents.append(content)
        return [self._cut(digest) for digest in hashes] if self._is_cut else hashes, contents

    def _cut(self, digest: bytes) -> bytes:
        if not self._is_cut:
            return digest
        head, last = digest[: self._num_bytes - 1], digest[self._num_bytes - 1]
        return head + bytes((last & self._last_mask,))


def _prefixed(data: bytes) -> bytes:
    return _U32.pack(len(data)) + data
