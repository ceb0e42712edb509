"""Which kv_heads lie in which region of a worker, and which bytes two workers' regions have in common.

A worker of one rank has the region ``kv``; one of several has ``kv.0``, ``kv.1``, ...: equal shares of
every block's heads, in order. A block's id is the same in all of them. Owns this arithmetic; no memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from shared.errors import TransferError
from shared.types.transfer import RegionInfo

T = TypeVar("T")


class Shard(NamedTuple):
    """What one rank holds of a group: ``num_heads`` kv_heads from ``first_head`` of the whole model on, of
    ``head_bytes`` each, in blocks of ``region``."""

    region: RegionInfo
    first_head: int
    num_heads: int
    head_bytes: int


class Span(NamedTuple):
    """Heads that lie in one region there and in one region here: where they begin within a block of
    each, and their length, in bytes."""

    source: RegionInfo
    target: RegionInfo
    source_at: int
    target_at: int
    nbytes: int


def region_name(name: str, rank: int, num_ranks: int) -> str:
    """The region of a rank."""
    return name if num_ranks == 1 else f"{name}.{rank}"


def ranks_of(regions: Mapping[str, T], name: str) -> list[T]:
    """What belongs to the ranks of ``name``, in order; empty when there is none."""
    if name in regions:
        return [regions[name]]
    found: list[T] = []
    while (rank := region_name(name, len(found), 0)) in regions:
        found.append(regions[rank])
    return found


def shards(ranks: Sequence[RegionInfo], group: int, num_heads: int) -> list[Shard]:
    """How these ranks share a group's ``num_heads`` heads; each has as many blocks. Raises TransferError when
    they do not, or when there is no such region or group."""
    if not ranks:
        raise TransferError("there is no such region")
    share, rest = divmod(num_heads, len(ranks))
    found: list[Shard] = []
    for region in ranks:
        if not 0 <= group < len(region.num_blocks):
            raise TransferError("the pull names a group that is not there")
        extent = region.extent_bytes[group]
        if share < 1 or rest or extent % share:
            raise TransferError("the blocks do not divide into heads")
        if found and (extent, region.num_blocks[group]) != (
            ranks[0].extent_bytes[group],
            ranks[0].num_blocks[group],
        ):
            raise TransferError("the ranks differ in their blocks")
        found.append(Shard(region, share * len(found), share, extent // share))
    return found


def spans(sources: Sequence[Shard], targets: Sequence[Shard]) -> list[Span]:
    """Every head once, by the pair of regions that it goes between. Both sides have the same heads; raises
    TransferError when these differ in size."""
    size = sources[0].head_bytes
    if size != targets[0].head_bytes:
        raise TransferError("the two sides' blocks differ in size")
    found: list[Span] = []
    for source in sources:
        for target in targets:
            first, count = common(source, target.first_head, target.num_heads)
            if count > 0:
                source_at = (first - source.first_head) * size
                target_at = (first - target.first_head) * size
                found.append(Span(source.region, target.region, source_at, target_at, count * size))
    return found


def common(shard: Shard, first: int, count: int) -> tuple[int, int]:
    """First head, and number (not above 0: none), of those heads ``first`` .. that the shard has."""
    own, stop = shard.first_head, first + count
    own_stop = own + shard.num_heads
    low = own if own > first else first
    return low, (own_stop if own_stop < stop else stop) - low


class RankGenerations:
    """One generation a block, kept equal in the tables of all ranks. Reads the first."""

    def __init__(self, tables: Sequence[Any]) -> None:
        self._tables = tuple(tables)

    def __len__(self) -> int:
        return len(self._tables[0])

    def __getitem__(self, index: int) -> Any:
        return self._tables[0][index]

    def __setitem__(self, index: int, value: int) -> None:
        for table in self._tables:
            table[index] = value
