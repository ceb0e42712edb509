"""What a pull is, and the protocol that makes its bytes trustworthy. Torch-free, thread-free.

The fence of a block is what its producer's arena says: incarnation, epoch and the block's generation.
A pull reads the fence, the blocks, and the fence again; a producer raises a block's generation before
it writes anything new, so an unchanged fence means the bytes in between are of that block. Then the
checksums, taken by the producer at commit, are compared with our own memory. Owns the order of these
reads and the verdict a block; not threads, connections or deadlines (``puller``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from shared.errors import PeerLost, TransferError
from shared.failpoints import Failpoints
from shared.kernels.checksum import head_checksums, packed_checksum
from shared.transfer.arena import HEADER_BYTES, Arena, Header, parse_header
from shared.transfer.base import ReadOp
from shared.types.transfer import AgentInfo, BlockRef, RegionInfo

#: Blocks in one pull, so that their generations fit a scratch slot.
MAX_PULL_BLOCKS = 4088
#: Bytes of scratch that one pull uses, for the fence.
SCRATCH_BYTES = HEADER_BYTES + 8 * MAX_PULL_BLOCKS
SCRATCH = "scratch"


class BlockPull(Struct, frozen=True):
    """One block: where it is at the producer, and our block that it fills."""

    remote: BlockRef
    local_block: int


class PackedCheck(Struct, frozen=True):
    """Blocks that hold one packed item: only ``num_bytes`` are valid, under one checksum."""

    num_bytes: int
    checksum: int


class Pull(Struct, frozen=True):
    """Copy blocks of one group of the producer's region into our region of the same name.

    ``checksum_heads`` is the number of kv_heads, and so of checksums, a block has; it is not used
    when ``packed`` is given: then the blocks are verified together, and are all good or none.
    ``deadline_s`` None = the puller's own.
    """

    pull_id: str
    producer: AgentInfo
    region: str
    group: int
    blocks: tuple[BlockPull, ...]
    checksum_heads: int
    deadline_s: float | None = None
    packed: PackedCheck | None = None


class PullOutcome(Struct, frozen=True):
    """How a pull ended. ``ok`` is parallel to its blocks: bytes that were read and verified.

    ``reason`` is "" when all are, else one of stale, corrupt, timeout, peer_lost, cancelled, failed.
    While ``terminal`` is False the destinations may still be written; ``settled`` follows.
    ``nbytes`` counts verified bytes, ``seconds`` is the time since submission.
    """

    pull_id: str
    ok: tuple[bool, ...]
    reason: str
    terminal: bool
    nbytes: int
    seconds: float
    backend: str


class Step(NamedTuple):
    """A read that has to be done before the protocol goes on."""

    local_region: str
    ops: list[ReadOp]


class PullProtocol:
    """One pull, step by step: iterate ``steps``, finish each read before asking for the next, then
    look at ``ok``, ``reason`` and ``nbytes``.

    Raises TransferError at construction when the pull cannot fit the regions of the two sides.
    ``slot`` is the pull's own block of the scratch arena.
    """

    def __init__(
        self, pull: Pull, target: Arena, scratch: Arena, slot: int, failpoints: Failpoints, *, verify: bool
    ) -> None:
        self._pull = pull
        self._target = target
        self._source = _find_region(pull.producer, pull.region)
        self._scratch = scratch.block(0, slot)
        self._scratch_offset = scratch.info.data_offsets[0] + slot * scratch.info.extent_bytes[0]
        self._failpoints = failpoints
        self._verify = verify
        self._problems: set[str] = set()
        self.ok = [True] * len(pull.blocks)
        _check_fit(pull, self._source, target.info)
        self._sizes = self._block_sizes()

    @property
    def reason(self) -> str:
        """The worst thing seen; "" when every block is good."""
        return next((r for r in ("corrupt", "stale") if r in self._problems), "")

    @property
    def nbytes(self) -> int:
        return sum(size for size, ok in zip(self._sizes, self.ok, strict=True) if ok)

    def steps(self) -> Iterator[Step]:
        """See the module. Raises FailpointError where one is armed."""
        yield self._fence()
        self._judge_fence()
        if not any(self.ok):
            return
        yield self._blocks()
        for _ in range(sum(self.ok)):
            self._failpoints.hit("xfer.after_k")
        yield self._fence()
        self._judge_fence()
        self._failpoints.hit("xfer.before_verified")
        if self._verify:
            self._judge_bytes()

    def _block_sizes(self) -> list[int]:
        extent = self._target.info.extent_bytes[self._pull.group]
        sizes = [extent] * len(self._pull.blocks)
        if self._pull.packed is not None:
            sizes[-1] = self._pull.packed.num_bytes - extent * (len(sizes) - 1)
        return sizes

    def _fence(self) -> Step:
        # Zeroed, so that a read that brings less than it says can never look like the one before.
        used = HEADER_BYTES + 8 * len(self._pull.blocks)
        self._scratch[:used] = bytes(used)
        table = self._source.generation_offsets[self._pull.group]
        local = self._scratch_offset
        ops = [ReadOp(0, local, HEADER_BYTES)]
        ops += [
            ReadOp(table + 8 * block.remote.block_id, local + HEADER_BYTES + 8 * i, 8)
            for i, block in enumerate(self._pull.blocks)
        ]
        return Step(SCRATCH, ops)

    def _judge_fence(self) -> None:
        producer = self._pull.producer
        try:
            header = parse_header(self._scratch[:HEADER_BYTES])
        except PeerLost:
            header = Header("", -1, "")
        same_life = header.incarnation == producer.incarnation and header.epoch == producer.epoch
        seen = np.frombuffer(self._scratch, np.uint64, len(self.ok), HEADER_BYTES).tolist()
        self._mark(
            "stale",
            [
                same_life and generation == block.remote.generation != 0
                for generation, block in zip(seen, self._pull.blocks, strict=True)
            ],
        )

    def _blocks(self) -> Step:
        group = self._pull.group
        source, target = self._source, self._target.info
        source_extent, target_extent = source.extent_bytes[group], target.extent_bytes[group]
        ops = [
            ReadOp(
                source.data_offsets[group] + block.remote.block_id * source_extent,
                target.data_offsets[group] + block.local_block * target_extent,
                size,
            )
            for block, size, ok in zip(self._pull.blocks, self._sizes, self.ok, strict=True)
            if ok
        ]
        return Step(target.name, ops)

    def _judge_bytes(self) -> None:
        pull = self._pull
        extents = [self._target.block(pull.group, block.local_block) for block in pull.blocks]
        if pull.packed is not None:
            parts = [extent[:size] for extent, size in zip(extents, self._sizes, strict=True)]
            good = all(self.ok) and packed_checksum(parts) == pull.packed.checksum
            self._mark("corrupt", [good] * len(self.ok))
            return
        self._mark(
            "corrupt",
            [
                not ok or head_checksums(extent, pull.checksum_heads) == block.remote.checksums
                for ok, extent, block in zip(self.ok, extents, pull.blocks, strict=True)
            ],
        )

    def _mark(self, problem: str, good: Sequence[bool]) -> None:
        if self._pull.packed is not None:
            good = [all(good)] * len(good)
        if not all(good):
            # An earlier verdict stands: a block that was stale is not corrupt as well.
            if any(ok and not fine for ok, fine in zip(self.ok, good, strict=True)):
                self._problems.add(problem)
            self.ok = [ok and fine for ok, fine in zip(self.ok, good, strict=True)]


def _find_region(producer: AgentInfo, name: str) -> RegionInfo:
    for region in producer.regions:
        if region.name == name:
            return region
    raise TransferError(f"the producer has no region {name!r}")


def _check_fit(pull: Pull, source: RegionInfo, target: RegionInfo) -> None:
    group = pull.group
    if not 0 <= group < min(len(source.num_blocks), len(target.num_blocks)):
        raise TransferError("the pull names a group that is not there")
    extent = target.extent_bytes[group]
    if source.extent_bytes[group] != extent:
        raise TransferError("the two sides' blocks differ in size")
    if not 0 < len(pull.blocks) <= MAX_PULL_BLOCKS:
        raise TransferError("too few or too many blocks in one pull")
    for block in pull.blocks:
        if not 0 <= block.remote.block_id < source.num_blocks[group]:
            raise TransferError("the pull names a block that the producer does not have")
        if not 0 <= block.local_block < target.num_blocks[group]:
            raise TransferError("the pull names a block that is not here")
    if pull.packed is not None:
        last = pull.packed.num_bytes - extent * (len(pull.blocks) - 1)
        if not 0 < last <= extent:
            raise TransferError("the packed bytes do not fill the blocks")
    elif pull.checksum_heads <= 0 or extent % pull.checksum_heads:
        raise TransferError("the blocks do not divide into heads")
