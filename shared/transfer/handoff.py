"""What a pull is, and the protocol that makes its bytes trustworthy. Torch-free, thread-free.

The fence of a block is what its producer's arena says: incarnation, epoch and the block's generation.
A pull reads the fence, the blocks, and the fence again; a producer raises a block's generation before
it writes anything new, so an unchanged fence means the bytes in between are of that block. Then the
checksums, taken by the producer at commit, are compared with our own memory. Owns the order of these
reads and the verdict a block; not threads, connections or deadlines (``puller``), nor how blocks of another
size become ours (``reslice``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from shared.errors import PeerLost, TransferError
from shared.failpoints import Failpoints
from shared.kernels.checksum import head_checksums, packed_checksum
from shared.transfer.arena import HEADER_BYTES, Arena, Header, parse_header
from shared.transfer.base import ReadOp, Sums
from shared.transfer.shards import Span, ranks_of, shards, spans
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


class Reslice(Struct, frozen=True):
    """How blocks of ``source_tokens`` become ours of ``target_tokens``; one number divides the other.

    ``into`` are our blocks in the order of their tokens, -1 for one that stays as it is. The pull's block of
    ``local_block`` n holds the tokens from ``n * source_tokens`` on, counted from the first of ``into``.
    ``num_planes``: layers times 2, the runs of tokens that a kv_head has in a block.
    """

    source_tokens: int
    target_tokens: int
    num_planes: int
    into: tuple[int, ...]


class Pull(Struct, frozen=True):
    """Copy blocks of one group of the producer's region into our region of the same name, whichever way
    the ranks of either side share the heads (``shards``).

    ``checksum_heads`` is the number of kv_heads of the whole model, and so of checksums, a block has; it is
    not used when ``packed`` is given: then the blocks are verified together, and are all good or none.
    ``reslice``: the producer's blocks have another size. ``deadline_s`` None = the puller's own.
    """

    pull_id: str
    producer: AgentInfo
    region: str
    group: int
    blocks: tuple[BlockPull, ...]
    checksum_heads: int
    deadline_s: float | None = None
    packed: PackedCheck | None = None
    reslice: Reslice | None = None


class PullOutcome(Struct, frozen=True):
    """How a pull ended. ``ok`` is parallel to its blocks: bytes that were read and verified.

    ``reason`` is "" when all are, else one of stale, corrupt, timeout, peer_lost, cancelled, failed.
    While ``terminal`` is False the destinations may still be written; ``settled`` follows.
    ``nbytes`` counts verified bytes, ``seconds`` is the time since submission. ``made``, with a reslice:
    for each of ``into`` that is whole its checksums, taken from our memory, and () for the others.
    """

    pull_id: str
    ok: tuple[bool, ...]
    reason: str
    terminal: bool
    nbytes: int
    seconds: float
    backend: str
    made: tuple[tuple[int, ...], ...] = ()


class Step(NamedTuple):
    """A read that has to be done before the protocol goes on."""

    remote_region: str
    local_region: str
    ops: list[ReadOp]
    sums: Sums | None = None


class Local(NamedTuple):
    """One rank's blocks of a group in our memory: of ``extent`` bytes and ``num_heads`` heads each."""

    data: memoryview
    extent: int
    num_heads: int

    def block(self, block_id: int) -> memoryview:
        return self.data[block_id * self.extent : (block_id + 1) * self.extent]


class PullProtocol(ABC):
    """One pull, step by step: iterate ``steps``, finish each read before asking for the next, then
    look at ``ok``, ``reason``, ``nbytes`` and ``made``. Owns the fence and the verdicts.

    Raises TransferError at construction when the pull cannot fit the regions of the two sides.
    ``arenas`` are ours by name; ``slot`` is the pull's own block of the scratch arena.
    """

    def __init__(
        self,
        pull: Pull,
        arenas: Mapping[str, Arena],
        scratch: Arena,
        slot: int,
        failpoints: Failpoints,
        *,
        verify: bool,
    ) -> None:
        if not 0 < len(pull.blocks) <= MAX_PULL_BLOCKS:
            raise TransferError("too few or too many blocks in one pull")
        heads = pull.checksum_heads if pull.packed is None else 1
        local = ranks_of(arenas, pull.region)
        remote = ranks_of({region.name: region for region in pull.producer.regions}, pull.region)
        self._pull = pull
        self._sources = shards(remote, pull.group, heads)
        self._targets = shards([arena.info for arena in local], pull.group, heads)
        self._local = [
            Local(arena.data(pull.group), arena.info.extent_bytes[pull.group], shard.num_heads)
            for arena, shard in zip(local, self._targets, strict=True)
        ]
        self._arenas = arenas
        self._slot = slot
        self._scratch = scratch.block(0, slot)
        self._scratch_offset = scratch.info.data_offsets[0] + slot * scratch.info.extent_bytes[0]
        self._failpoints = failpoints
        self._verify = verify
        self._entries: list[int] = []
        self._problems: set[str] = set()
        self.ok = [True] * len(pull.blocks)
        self.made: tuple[tuple[int, ...], ...] = ()
        self._prepare(remote[0].num_blocks[pull.group], local[0].info.num_blocks[pull.group])

    @property
    def reason(self) -> str:
        """The worst thing seen; "" when every block is good."""
        return next((r for r in ("corrupt", "stale") if r in self._problems), "")

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the blocks that are good."""

    @abstractmethod
    def _prepare(self, num_there: int, num_here: int) -> None:
        """End of construction. Raises TransferError when the pull does not fit the blocks of each side."""

    @abstractmethod
    def steps(self) -> Iterator[Step]:
        """See the module. Raises FailpointError where one is armed."""

    def _fences(self) -> Iterator[Step]:
        """Read and judge what every region that blocks come from says of them."""
        for shard in self._sources:
            yield self._fence(shard.region)
            self._judge_fence()

    def _fence(self, source: RegionInfo) -> Step:
        ids = [block.remote.block_id for block in self._pull.blocks]
        table, local = source.generation_offsets[self._pull.group], self._scratch_offset + HEADER_BYTES
        first, span = min(ids), max(ids) - min(ids) + 1
        if span <= MAX_PULL_BLOCKS:  # one piece of the table, gaps and all
            self._entries = [block_id - first for block_id in ids]
            generations = [ReadOp(table + 8 * first, local, 8 * span)]
        else:
            self._entries = list(range(len(ids)))
            generations = [ReadOp(table + 8 * block_id, local + 8 * i, 8) for i, block_id in enumerate(ids)]
        # Zeroed, so that a read that brings less than it says can never look like the one before.
        used = HEADER_BYTES + 8 * (max(self._entries) + 1)
        self._scratch[:used] = bytes(used)
        return Step(source.name, SCRATCH, [ReadOp(0, self._scratch_offset, HEADER_BYTES), *generations])

    def _judge_fence(self) -> None:
        producer = self._pull.producer
        try:
            header = parse_header(self._scratch[:HEADER_BYTES])
        except PeerLost:
            header = Header("", -1, "")
        same_life = header.incarnation == producer.incarnation and header.epoch == producer.epoch
        table = self._scratch[HEADER_BYTES:][: 8 * (max(self._entries) + 1)].cast("Q")
        seen = [table[entry] for entry in self._entries]
        self._mark(
            "stale",
            [
                same_life and generation == block.remote.generation != 0
                for generation, block in zip(seen, self._pull.blocks, strict=True)
            ],
        )

    def _checksums(self, block_id: int) -> tuple[int, ...]:
        """Of one of our blocks, in the order of the whole model's heads, from memory."""
        sums: tuple[int, ...] = ()
        for data, extent, num_heads in self._local:
            sums += head_checksums(data[block_id * extent : (block_id + 1) * extent], num_heads)
        return sums

    def _mark(self, problem: str, good: Sequence[bool]) -> None:
        if self._pull.packed is not None:
            good = [all(good)] * len(good)
        if not all(good):
            # An earlier verdict stands: a block that was stale is not corrupt as well.
            if any(ok and not fine for ok, fine in zip(self.ok, good, strict=True)):
                self._problems.add(problem)
            self.ok = [ok and fine for ok, fine in zip(self.ok, good, strict=True)]


class DirectPull(PullProtocol):
    """Blocks of equal size on both sides: they are read straight into their places, head by head where the
    ranks differ, and verified there."""

    def _prepare(self, num_there: int, num_here: int) -> None:
        self._spans = spans(self._sources, self._targets)
        for block in self._pull.blocks:
            if not (0 <= block.remote.block_id < num_there and 0 <= block.local_block < num_here):
                raise TransferError("the pull names a block that is not there, or not here")
        self._sizes = self._block_sizes()
        # Checksums of whole blocks can be taken as they land.
        whole = self._verify and self._pull.packed is None and len(self._spans) == 1
        self._sums = Sums(self._sources[0].head_bytes) if whole else None
        self._read: list[int] = []

    @property
    def nbytes(self) -> int:
        return sum(size for size, ok in zip(self._sizes, self.ok, strict=True) if ok)

    def steps(self) -> Iterator[Step]:
        yield from self._fences()
        if not any(self.ok):
            return
        for span in self._spans:
            yield self._blocks(span)
        for _ in range(sum(self.ok)):
            self._failpoints.hit("xfer.after_k")
        yield from self._fences()
        self._failpoints.hit("xfer.before_verified")
        if self._verify:
            self._judge_bytes()

    def _block_sizes(self) -> list[int]:
        extent = sum(shard.num_heads * shard.head_bytes for shard in self._targets)
        sizes = [extent] * len(self._pull.blocks)
        if self._pull.packed is not None:
            sizes[-1] = self._pull.packed.num_bytes - extent * (len(sizes) - 1)
            if not 0 < sizes[-1] <= extent:
                raise TransferError("the packed bytes do not fill the blocks")
        return sizes

    def _blocks(self, span: Span) -> Step:
        group = self._pull.group
        source, target = span.source, span.target
        source_extent, target_extent = source.extent_bytes[group], target.extent_bytes[group]
        source_at = source.data_offsets[group] + span.source_at
        target_at = target.data_offsets[group] + span.target_at
        # Packed blocks lie in one region as a whole, and the last may be filled in part.
        sizes = [span.nbytes] * len(self.ok) if self._pull.packed is None else self._sizes
        ops = [
            ReadOp(
                source_at + block.remote.block_id * source_extent,
                target_at + block.local_block * target_extent,
                size,
            )
            for block, size, ok in zip(self._pull.blocks, sizes, self.ok, strict=True)
            if ok
        ]
        self._read = [i for i, ok in enumerate(self.ok) if ok]
        return Step(source.name, target.name, ops, self._sums)

    def _judge_bytes(self) -> None:
        pull = self._pull
        if pull.packed is not None:
            extents = [self._local[0].block(block.local_block) for block in pull.blocks]
            parts = [extent[:size] for extent, size in zip(extents, self._sizes, strict=True)]
            good = all(self.ok) and packed_checksum(parts) == pull.packed.checksum
            self._mark("corrupt", [good] * len(self.ok))
            return
        found = self._found()
        same = [sums == block.remote.checksums for sums, block in zip(found, pull.blocks, strict=True)]
        self._mark("corrupt", same)

    def _found(self) -> list[tuple[int, ...]]:
        """Of each block its checksums, as the backend took them when it landed, or else taken now."""
        found: list[tuple[int, ...]] = [()] * len(self.ok)
        landed = self._sums.values if self._sums is not None else None
        for at, i in enumerate(self._read):
            if landed is None:
                found[i] = self._checksums(self._pull.blocks[i].local_block)
            else:
                heads = self._pull.checksum_heads
                found[i] = tuple(landed[at * heads : (at + 1) * heads])
        return found
