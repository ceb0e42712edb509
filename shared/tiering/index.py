"""An index of blocks by hash that compares what the hash stands for. Owns no blocks."""

from __future__ import annotations

from collections.abc import Sequence


class PrefixIndex:
    """At most one block a hash. ``content`` is all that the hash was made of (``block_content``)."""

    def __init__(self) -> None:
        self._contents: dict[bytes, bytes] = {}
        self._ids: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def longest(self, hashes: Sequence[bytes], contents: Sequence[bytes]) -> list[int]:
        """Block ids of the longest prefix that is here; the two lists are parallel."""
        # Everything stays inside of list and dict methods: this is the hot path of a look-up.
        found = list(map(self._contents.get, hashes))
        if found != contents:
            pairs = enumerate(zip(found, contents, strict=True))
            hashes = hashes[: next(index for index, (here, wanted) in pairs if here != wanted)]
        return list(map(self._ids.__getitem__, hashes))

    def get(self, block_hash: bytes, content: bytes) -> int | None:
        return self._ids[block_hash] if self._contents.get(block_hash) == content else None

    def put(self, block_hash: bytes, content: bytes, block_id: int) -> None:
        self._contents[block_hash] = content
        self._ids[block_hash] = block_id

    def pop(self, block_hash: bytes) -> None:
        del self._contents[block_hash], self._ids[block_hash]
