"""Workers' KV memory with ranks and block sizes of any kind, beside the same KV as one plain array.

The array, of shape [head, plane, token, byte], is the slow reference: what a rank's block must hold is a
slice of it, whoever's block it is.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Any

import numpy as np

from shared.clock import MonotonicClock
from shared.kernels.checksum import head_checksums
from shared.transfer.agent import TransferAgent
from shared.transfer.arena import HEADER_BYTES, Arena, parse_header
from shared.transfer.base import TransferBackend
from shared.transfer.handoff import BlockPull, Pull, PullOutcome
from shared.transfer.puller import Puller
from shared.transfer.regroup import Regroup
from shared.transfer.reslice import STAGE, make_stage
from shared.transfer.shards import RankGenerations, region_name
from shared.types.identity import LayoutSpec
from shared.types.kv import KVGroupSpec
from shared.types.transfer import AgentInfo, BlockRef

PATIENCE_S = 20.0


def stream(group: KVGroupSpec, num_tokens: int, seed: int) -> np.ndarray[Any, Any]:
    """Random KV of so many tokens."""
    row = group.head_bytes(1) // (2 * group.num_layers)
    shape = (group.num_kv_heads, 2 * group.num_layers, num_tokens, row)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


class RankedMemory:
    """Arenas of one worker: ``kv`` a rank, and a stage. ``num_blocks`` of each group."""

    def __init__(
        self,
        groups: Sequence[KVGroupSpec],
        block_size: int,
        tp_size: int,
        num_blocks: int,
        incarnation: str = "a" * 32,
    ) -> None:
        self.groups, self.block_size, self.tp_size = tuple(groups), block_size, tp_size
        extents = [group.extent_bytes(block_size) // tp_size for group in groups]
        self.ranks = [
            Arena.create(
                region_name("kv", rank, tp_size), (num_blocks,) * len(extents), tuple(extents), incarnation
            )
            for rank in range(tp_size)
        ]
        self.arenas = {arena.info.name: arena for arena in self.ranks}
        self.arenas[STAGE] = make_stage(groups, incarnation)
        self.generations = [
            RankGenerations([arena.generations(group) for arena in self.ranks])
            for group in range(len(groups))
        ]

    @property
    def layout(self) -> LayoutSpec:
        return LayoutSpec(self.groups, self.block_size, self.tp_size)

    def block(self, group: int, block_id: int) -> np.ndarray[Any, Any]:
        """What all ranks hold, as a copy. Shape: [head, plane, token, byte]."""
        spec = self.groups[group]
        raw = b"".join(bytes(arena.block(group, block_id)) for arena in self.ranks)
        return np.frombuffer(raw, np.uint8).reshape(
            spec.num_kv_heads, 2 * spec.num_layers, self.block_size, -1
        )

    def commit(self, group: int, block_id: int, content: np.ndarray[Any, Any]) -> BlockRef:
        """Fill a block with tokens from the front; the rest of it keeps what was there."""
        block = self.block(group, block_id).copy()
        block[:, :, : content.shape[2]] = content
        self.generations[group][block_id] += 1
        shares = np.split(block, self.tp_size)
        sums: tuple[int, ...] = ()
        for arena, share in zip(self.ranks, shares, strict=True):
            arena.block(group, block_id)[:] = share.tobytes()
            sums += head_checksums(arena.block(group, block_id), share.shape[0])
        return BlockRef(block_id, int(self.generations[group][block_id]), sums)

    def commit_all(self, group: int, ids: Sequence[int], kv: np.ndarray[Any, Any]) -> list[BlockRef]:
        """A whole stream, cut into blocks."""
        size = self.block_size
        return [
            self.commit(group, block_id, kv[:, :, index * size : (index + 1) * size])
            for index, block_id in enumerate(ids)
        ]

    def close(self) -> None:
        for arena in self.arenas.values():
            arena.close()


def converting_pull(
    pull_id: str,
    source: RankedMemory,
    info: AgentInfo,
    refs: Sequence[BlockRef],
    target: RankedMemory,
    table: Sequence[int],
    num_tokens: int,
    group: int = 0,
    wanted: Sequence[int] | None = None,
) -> Pull:
    """The pull of a whole prompt into ``table``, as a landing would ask for it."""
    spec = target.groups[group]
    blocks = tuple(BlockPull(ref, block) for ref, block in zip(refs, table, strict=False))
    reslice = None
    if source.block_size != target.block_size:
        regroup = Regroup(source.block_size, target.block_size, num_tokens, 2 * spec.num_layers)
        found = regroup.add(0, refs, table, range(len(table)) if wanted is None else wanted)
        assert found is not None
        blocks, reslice = found.blocks, found.reslice
    return Pull(pull_id, info, "kv", group, blocks, spec.num_kv_heads, reslice=reslice)


class Side:
    """A worker's memory behind an agent and a puller, whose callbacks go to queues."""

    def __init__(self, name: str, memory: RankedMemory, backend: TransferBackend, **puller: Any) -> None:
        self.memory = memory
        incarnation = parse_header(memory.ranks[0].buffer[:HEADER_BYTES]).incarnation
        self.agent = TransferAgent(name, incarnation, [backend], memory.arenas, [backend.name])
        self.outcomes: queue.Queue[PullOutcome] = queue.Queue()
        self.settled: queue.Queue[str] = queue.Queue()
        self.puller = Puller(
            self.agent,
            deliver=self.outcomes.put,
            settled=self.settled.put,
            notified=lambda payload: None,
            **{"clock": MonotonicClock(), "deadline_s": PATIENCE_S, **puller},
        )
        self.puller.expect(True)

    @property
    def info(self) -> AgentInfo:
        return self.agent.info(self.memory.layout)

    def pull(self, pull: Pull) -> PullOutcome:
        self.puller.submit(pull)
        return self.outcomes.get(timeout=PATIENCE_S)

    def close(self) -> None:
        self.puller.close()
        self.agent.close()
        self.memory.close()
