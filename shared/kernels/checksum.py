"""Checksums of KV extents and packed embeddings; owns the algorithms by name, not when they are taken.

A checksum is computed once, from the producer's memory, and travels with the bytes. It guards
against faults, not against an adversary. Torch-free; buffers are read in place, never copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import xxhash

from shared.errors import ConfigError

Buffer = bytes | bytearray | memoryview


class StreamingHash(Protocol):
    """A 64-bit hash fed piece by piece; the pieces' borders do not matter."""

    def update(self, data: Buffer, /) -> None: ...

    def intdigest(self) -> int: ...


#: The algorithms that ``LayoutSpec.checksum`` may name.
ALGORITHMS: dict[str, Callable[[], StreamingHash]] = {"xxh3_64": xxhash.xxh3_64}


def checksum(data: Buffer) -> int:
    """64-bit checksum (xxh3_64) of one contiguous buffer."""
    return xxhash.xxh3_64_intdigest(data)


def head_checksums(extent: memoryview, num_heads: int) -> tuple[int, ...]:
    """One 64-bit checksum (xxh3_64) a kv_head of a block: its heads are equal contiguous
    sub-extents. Raises ValueError when ``extent`` does not divide into ``num_heads``."""
    head_bytes, rest = divmod(extent.nbytes, num_heads) if num_heads > 0 else (0, 1)
    if rest or not head_bytes:
        raise ValueError(f"{extent.nbytes} bytes do not divide into {num_heads} heads")
    flat = extent.cast("B")
    digest = xxhash.xxh3_64_intdigest
    return tuple(digest(flat[at : at + head_bytes]) for at in range(0, flat.nbytes, head_bytes))


def packed_checksum(parts: Iterable[Buffer], algorithm: str = "xxh3_64") -> int:
    """Checksum of the parts as if they were one buffer. Raises ConfigError on an unknown algorithm."""
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"unknown checksum {algorithm!r}; known: {', '.join(sorted(ALGORITHMS))}")
    digest = ALGORITHMS[algorithm]()
    for part in parts:
        digest.update(part)
    return digest.intdigest()
