"""Which blocks of a sequence want checksums, and which of those that arrive still hold.

Owns that rule for ``manager``. Computes no checksum: the producer does, from its own memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shared.kv_cache.block_pool import BlockPool
from shared.kv_cache.sequence import SequenceState

#: By (group, block id): one value a kv_head.
Checksums = Mapping[tuple[int, int], tuple[int, ...]]


def sealable(
    seq: SequenceState, pools: Sequence[BlockPool], num_computed: int, block_size: int, tail: bool
) -> list[tuple[int, int, int]]:
    """(group, index, block id) of blocks not named before that have no checksums; marks them as named."""
    num_full, filled = divmod(num_computed, block_size)
    if num_full <= seq.num_sealed and not tail:
        return []
    indices = list(range(seq.num_sealed, num_full))
    seq.num_sealed = max(seq.num_sealed, num_full)
    if tail and filled and seq.tail_sealed != num_computed:
        seq.tail_sealed = num_computed
        indices.append(num_full)
    return [
        (group, index, table[index])
        for index in indices
        for group, (pool, table) in enumerate(zip(pools, seq.tables, strict=True))
        if not pool.checksums(table[index])
    ]


def keep(
    seq: SequenceState,
    pools: Sequence[BlockPool],
    num_computed: int,
    block_size: int,
    checksums: Checksums,
) -> None:
    """Store the checksums of the sequence's blocks, as they were when ``num_computed`` was reached."""
    num_full, filled = divmod(num_computed, block_size)
    # A later step may be writing into the tail already: then what was summed is there no more.
    stop = num_full + 1 if filled and seq.write_start < num_computed else num_full
    for index in range(seq.num_summed, stop):
        complete = index == seq.num_summed and index < num_full
        for group, (pool, table) in enumerate(zip(pools, seq.tables, strict=True)):
            sums = checksums.get((group, table[index]))
            if sums is not None:
                pool.set_checksums(table[index], sums)
            elif complete and not pool.checksums(table[index]):
                complete = False
        if complete:
            seq.num_summed = index + 1
