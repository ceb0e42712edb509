"""Which of our blocks are made of which of a producer's, when block sizes differ; moves nothing.

Both sides cut the same tokens, from the first on. A block of ours is asked for once all blocks that hold
its tokens are known, and in one pull: so no two pulls ever write to one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shared.transfer.handoff import BlockPull, Reslice
from shared.types.transfer import BlockRef


class Regrouped(NamedTuple):
    """A pull's worth: ``targets`` are the indices of ours that it makes, ascending."""

    targets: list[int]
    blocks: tuple[BlockPull, ...]
    reslice: Reslice


class Regroup:
    """Blocks of ``source_tokens`` of one group that a producer has announced, for ``num_tokens`` tokens in
    our blocks of ``target_tokens``. One size divides the other."""

    def __init__(self, source_tokens: int, target_tokens: int, num_tokens: int, num_planes: int) -> None:
        self._theirs = source_tokens
        self._ours = target_tokens
        self._num_tokens = num_tokens
        self._num_planes = num_planes
        self._known: dict[int, BlockRef] = {}

    def sources(self, index: int) -> range:
        """The producer's blocks that hold valid tokens of our block ``index``."""
        stop = min((index + 1) * self._ours, self._num_tokens)
        return range(index * self._ours // self._theirs, -(-stop // self._theirs))

    def add(
        self, first: int, refs: Sequence[BlockRef], table: Sequence[int], wanted: Sequence[int]
    ) -> Regrouped | None:
        """Hear of the producer's blocks ``first`` ..; returns what can be pulled now of the indices
        ``wanted`` (ascending) of our ``table``."""
        num_sources = -(-self._num_tokens // self._theirs)
        fresh = {index: ref for index, ref in enumerate(refs, first) if index < num_sources}
        self._known.update(fresh)
        begin, end = first * self._theirs, (first + len(refs)) * self._theirs
        targets = [
            index
            for index in wanted
            if index * self._ours < end
            and begin < (index + 1) * self._ours
            and all(source in self._known for source in self.sources(index))
        ]
        if not targets:
            return None
        return self._regrouped(targets, table)

    def _regrouped(self, targets: list[int], table: Sequence[int]) -> Regrouped:
        # A border of both sizes.
        border = max(self._theirs, self._ours)
        start = targets[0] * self._ours // border * border
        chosen = set(targets)
        window = range(start // self._ours, targets[-1] + 1)
        into = tuple([table[index] if index in chosen else -1 for index in window])
        sources = sorted({source for index in targets for source in self.sources(index)})
        blocks = tuple([BlockPull(self._known[i], i - start // self._theirs) for i in sources])
        return Regrouped(targets, blocks, Reslice(self._theirs, self._ours, self._num_planes, into))
