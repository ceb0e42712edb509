"""One group's paged witness KV over several tensor-parallel ranks: what each does alone, and the sum.

Every rank has an equal share of the heads, in memory of its own, under the same block ids. Entries depend on
their own head alone and states add up, so the ranks never wait for each other. Owns no arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from shared.runner.witness.paged import Ints, PagedWitness, Placement, UInts
from shared.runner.witness_config import WitnessConfig
from shared.types.kv import KVGroupSpec


class PagedRanks:
    """Looks like a ``PagedWitness`` of all heads. ``ranks`` in the order of their heads."""

    def __init__(self, ranks: Sequence[PagedWitness]) -> None:
        self._ranks = tuple(ranks)

    def close(self) -> None:
        """Let go of every rank's memory."""
        for rank in self._ranks:
            rank.close()

    def set_blocks(self, row: int, start: int, block_ids: Sequence[int]) -> None:
        """Replace the row's block table from index ``start`` on."""
        for rank in self._ranks:
            rank.set_blocks(row, start, block_ids)

    def copy_block(self, src: int, dst: int) -> None:
        """Copy one whole block."""
        for rank in self._ranks:
            rank.copy_block(src, dst)

    def checksums(self, block_id: int) -> tuple[int, ...]:
        """One checksum a kv_head of the whole model, in order."""
        return tuple([value for rank in self._ranks for value in rank.checksums(block_id)])

    def append(self, rows_R: Ints, positions_R: Ints, tokens_R: UInts) -> None:
        """Write one ordinary token's entries a row; the rows are distinct."""
        for rank in self._ranks:
            rank.append(rows_R, positions_R, tokens_R)

    def extend(self, row: int, first: int, kinds: Sequence[int], words: Sequence[int]) -> None:
        """Write the entries of a run of positions of one row."""
        for rank in self._ranks:
            rank.extend(row, first, kinds, words)

    def states(self, rows: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """This group's share of each row's state after its first ``lengths`` tokens, of all ranks."""
        shares = [rank.states(rows, lengths) for rank in self._ranks]
        return [sum(share) % 2**64 for share in zip(*shares, strict=True)]


def paged_ranks(
    config: WitnessConfig,
    group: KVGroupSpec,
    block_size: int,
    memories: Sequence[memoryview],
    first_layer: int,
) -> PagedWitness | PagedRanks:
    """A group over one memory a rank. ``group`` has the heads of the whole model."""
    heads = group.num_kv_heads // len(memories)
    share = replace(group, num_kv_heads=heads)
    ranks = [
        PagedWitness(config, share, block_size, data, Placement(first_layer, heads * rank))
        for rank, data in enumerate(memories)
    ]
    return ranks[0] if len(ranks) == 1 else PagedRanks(ranks)
