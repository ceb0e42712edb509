"""Segments: runs of a block chain that stay together where KV is spread over several stores.

Owns their length and their names. Segments are counted from the chain's first block; a segment is named by
the hash of its own first block, which covers everything before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from shared.kv_cache.block_hash import HashedBlock

SEGMENT_BLOCKS = 64


def segment_start(index: int) -> int:
    """The index of the first block of the segment in which block ``index`` of a chain is."""
    return index - index % SEGMENT_BLOCKS


class WantedBlock(NamedTuple):
    """A block to look up, and the name of its segment."""

    segment: bytes
    block: HashedBlock


def wanted_blocks(chain: Iterable[HashedBlock], first: int, stop: int) -> tuple[WantedBlock, ...]:
    """Blocks first .. stop - 1 of a chain, which is read from its first block on."""
    segment = b""
    wanted: list[WantedBlock] = []
    for index, block in enumerate(islice(chain, stop)):
        if index == segment_start(index):
            segment = block.block_hash
        if index >= first:
            wanted.append(WantedBlock(segment, block))
    return tuple(wanted)
