"""Blocks of another size: how they are pulled, verified and cut into ours.

The producer's blocks come whole into a staging region, a run of them at a time, and are verified there;
then their tokens are copied to where our blocks have them. Our blocks are new ones: their checksums are
taken from our own memory. All copying is the puller's thread, between two reads of the pull, so a pull that
was answered early writes nothing any more. Owns the staging region and this copying; which of our blocks
are made of which of theirs is ``regroup``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.errors import TransferError
from shared.kernels.checksum import head_checksums
from shared.kv_cache.convert import MAX_BLOCK_SIZE
from shared.transfer.arena import Arena
from shared.transfer.base import ReadOp
from shared.transfer.handoff import PullProtocol, Reslice, Step
from shared.transfer.shards import common
from shared.types.kv import KVGroupSpec

STAGE = "stage"
#: Pulls that can be resliced at a time; more wait.
NUM_STAGES = 4
#: Bytes that go through a stage at a time, so that they are verified and copied while the cache has them.
_RUN_BYTES = 2 << 20


def make_stage(groups: Iterable[KVGroupSpec], incarnation: str) -> Arena:
    """The staging arena for these groups. A stage holds one kv_head of the largest block there is: a head is
    the least that can be verified. Memory is used only once a pull is resliced."""
    largest = max(group.head_bytes(MAX_BLOCK_SIZE) for group in groups)
    return Arena.create(STAGE, (NUM_STAGES,), (max(_RUN_BYTES, largest),), incarnation)


class Overlap(NamedTuple):
    """Tokens that a block of theirs and one of ours (by its index in ``into``) have in common, and where they
    begin within either."""

    target: int
    source_token: int
    target_token: int
    num_tokens: int


def overlaps(reslice: Reslice, place: int) -> list[Overlap]:
    """Where the tokens of the source block at ``place`` go; blocks that stay as they are get none."""
    first, found = place * reslice.source_tokens, []
    stop = min(first + reslice.source_tokens, len(reslice.into) * reslice.target_tokens)
    at = first
    while at < stop:
        target, target_token = divmod(at, reslice.target_tokens)
        num_tokens = min(stop - at, reslice.target_tokens - target_token)
        if reslice.into[target] >= 0:
            found.append(Overlap(target, at - first, target_token, num_tokens))
        at += num_tokens
    return found


class Piece(NamedTuple):
    """Consecutive heads of one of the pull's blocks; the first is the ``at``-th head in the stage."""

    block: int
    first_head: int
    num_heads: int
    at: int


def runs(num_blocks: int, num_heads: int, capacity: int) -> Iterator[list[Piece]]:
    """Every head of every block once, in order, at most ``capacity`` heads at a time."""
    run: list[Piece] = []
    used = 0
    for block in range(num_blocks):
        head = 0
        while head < num_heads:
            count = min(capacity - used, num_heads - head)
            run.append(Piece(block, head, count, used))
            head, used = head + count, used + count
            if used == capacity:
                yield run
                run, used = [], 0
    if run:
        yield run


class StagedPull(PullProtocol):
    """A pull with a ``reslice``. ``slot`` is its stage, too."""

    def _prepare(self, num_there: int, num_here: int) -> None:
        pull, reslice, stage = self._pull, self._pull.reslice, self._arenas.get(STAGE)
        if reslice is None or stage is None or pull.packed is not None:
            raise TransferError("blocks of another size cannot be taken here")
        self._reslice = reslice
        theirs, ours = reslice.source_tokens, reslice.target_tokens
        if min(theirs, ours, reslice.num_planes) < 1 or (theirs % ours and ours % theirs):
            raise TransferError("one block size does not divide the other")
        self._head_bytes = self._sources[0].head_bytes
        self._token_bytes, rest = divmod(self._targets[0].head_bytes, reslice.num_planes * ours)
        if rest or self._head_bytes != self._token_bytes * reslice.num_planes * theirs:
            raise TransferError("the two sides' tokens differ in size")
        if self._head_bytes > stage.info.extent_bytes[0]:
            raise TransferError("the producer's blocks are too large to be taken")
        if any(not 0 <= block.remote.block_id < num_there for block in pull.blocks):
            raise TransferError("the pull names a block that is not there")
        if any(not -1 <= block_id < num_here for block_id in reslice.into):
            raise TransferError("the pull names a block that is not here")
        if any(not 0 <= b.local_block * theirs < len(reslice.into) * ours for b in pull.blocks):
            raise TransferError("a block of the pull lies outside of ours")
        self._stage_at = stage.info.data_offsets[0] + self._slot * stage.info.extent_bytes[0]
        self._stage = stage.block(0, self._slot)
        self._overlaps = [overlaps(reslice, block.local_block) for block in pull.blocks]

    @property
    def nbytes(self) -> int:
        return self._head_bytes * self._pull.checksum_heads * sum(self.ok)

    def steps(self) -> Iterator[Step]:
        yield from self._fences()
        capacity = max(1, _RUN_BYTES // self._head_bytes)
        for run in runs(len(self.ok), self._pull.checksum_heads, capacity):
            if not any(self.ok):
                return
            yield from self._reads([piece for piece in run if self.ok[piece.block]])
            for _ in run:
                self._failpoints.hit("xfer.after_k")
            yield from self._fences()
            self._failpoints.hit("xfer.before_verified")
            if self._verify:
                self._judge_bytes([piece for piece in run if self.ok[piece.block]])
            for piece in run:
                if self.ok[piece.block]:
                    self._copy(piece)
        self._make()

    def _reads(self, pieces: list[Piece]) -> Iterator[Step]:
        group, size = self._pull.group, self._head_bytes
        for shard in self._sources:
            data, extent = shard.region.data_offsets[group], shard.region.extent_bytes[group]
            ops: list[ReadOp] = []
            for piece in pieces:
                first, count = common(shard, piece.first_head, piece.num_heads)
                if count > 0:
                    block_id = self._pull.blocks[piece.block].remote.block_id
                    remote = data + block_id * extent + (first - shard.first_head) * size
                    local = self._stage_at + (piece.at + first - piece.first_head) * size
                    ops.append(ReadOp(remote, local, count * size))
            if ops:
                yield Step(shard.region.name, STAGE, ops)

    def _judge_bytes(self, pieces: list[Piece]) -> None:
        good = list(self.ok)
        for block, first, count, at in pieces:
            staged = self._stage[at * self._head_bytes : (at + count) * self._head_bytes]
            wanted = self._pull.blocks[block].remote.checksums
            whole = len(wanted) == self._pull.checksum_heads
            good[block] &= whole and head_checksums(staged, count) == wanted[first : first + count]
        self._mark("corrupt", good)

    def _copy(self, piece: Piece) -> None:
        """From the stage into our blocks."""
        reslice, size = self._reslice, self._token_bytes
        staged = self._heads(self._stage, piece.at, piece.num_heads, reslice.source_tokens)
        for shard, local in zip(self._targets, self._local, strict=True):
            first, count = common(shard, piece.first_head, piece.num_heads)
            if count <= 0:
                continue
            at = first - piece.first_head
            source, first = staged[at : at + count], first - shard.first_head
            for part in self._overlaps[piece.block]:
                block = local.block(reslice.into[part.target])
                target = self._heads(block, first, count, reslice.target_tokens)
                taken = slice(part.source_token * size, (part.source_token + part.num_tokens) * size)
                filled = slice(part.target_token * size, (part.target_token + part.num_tokens) * size)
                target[:, :, filled] = source[:, :, taken]

    def _heads(self, memory: memoryview, first: int, num_heads: int, num_tokens: int) -> NDArray[np.uint8]:
        """A view of consecutive heads. Shape: [head, plane, bytes of its tokens]."""
        shape = (num_heads, self._reslice.num_planes, num_tokens * self._token_bytes)
        head_bytes = shape[1] * shape[2]
        return np.frombuffer(memory, np.uint8, num_heads * head_bytes, first * head_bytes).reshape(shape)

    def _make(self) -> None:
        """Our blocks are whole where all that they are made of is good: then we are their producer."""
        whole: dict[int, bool] = {}
        for ok, parts in zip(self.ok, self._overlaps, strict=True):
            for part in parts:
                whole[part.target] = ok and whole.get(part.target, True)
        self.made = tuple(
            self._checksums(block_id) if whole.get(target) else ()
            for target, block_id in enumerate(self._reslice.into)
        )
