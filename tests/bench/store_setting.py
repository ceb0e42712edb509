"""What the parts of the store's bench share: layouts, chains of block keys, workers. Owns no measuring."""

from __future__ import annotations

import queue
import random
from collections.abc import Sequence
from typing import Literal

import numpy as np

from shared.clock import MonotonicClock, SystemEntropy
from shared.config.services import TransferConfig
from shared.kernels.checksum import head_checksums
from shared.kv_cache.block_hash import BlockHasher
from shared.kv_cache.block_pool import BlockPool
from shared.transfer.agent import TransferAgent
from shared.transfer.arena import Arena
from shared.transfer.factory import make_backends
from shared.transfer.handoff import BlockPull, Pull, PullOutcome
from shared.transfer.puller import Puller
from shared.types.identity import IdentityKey, LayoutSpec
from shared.types.kv import KVGroupSpec
from shared.types.store import BlockKey
from shared.types.transfer import AgentInfo, BlockRef, KvTransferParams

IDENTITY = IdentityKey("bench", "r", "t", "float32")
#: SmolLM2-135M in fp32, 16 tokens: 737,280 bytes a block.
LARGE = LayoutSpec((KVGroupSpec(30, 3, 64, "float32"),), 16)
#: The same in bf16: 368,640 bytes a block.
MEDIUM = LayoutSpec((KVGroupSpec(30, 3, 64, "bfloat16"),), 16)
SMALL = LayoutSpec((KVGroupSpec(1, 1, 16, "uint64"),), 16)
PREFIX = 64


def chain(hasher: BlockHasher, tokens: list[int]) -> list[BlockKey]:
    return [BlockKey(0, *block) for block in hasher.prompt(tokens)]


def tokens_of(rng: random.Random, num_blocks: int) -> list[int]:
    return [rng.randrange(49_152) for _ in range(16 * num_blocks)]


class Side:
    """An arena with its agent and its puller; outcomes go to a queue."""

    def __init__(
        self, name: str, num_blocks: int, layout: LayoutSpec, backend: Literal["shm", "tcp"] = "shm"
    ) -> None:
        incarnation = SystemEntropy().hex_id()
        extent_bytes = layout.groups[0].extent_bytes(layout.block_size)
        self.layout = layout
        self.arena = Arena.create("kv", (num_blocks,), (extent_bytes,), incarnation)
        np.frombuffer(self.arena.buffer, np.uint8)[self.arena.info.data_offsets[0] :] = 1
        config = TransferConfig(order=(backend,))
        self.agent = TransferAgent(
            name, incarnation, make_backends(config, name), {"kv": self.arena}, [backend]
        )
        self.outcomes: queue.SimpleQueue[PullOutcome] = queue.SimpleQueue()
        self.puller = Puller(
            self.agent,
            deliver=self.outcomes.put,
            settled=lambda pull_id: None,
            notified=lambda payload: None,
            clock=MonotonicClock(),
            deadline_s=60.0,
        )
        self._num_pulls = 0

    def info(self) -> AgentInfo:
        return self.agent.info(self.layout)

    def fill(self, block_id: int) -> BlockRef:
        """Commit bytes that no other block has."""
        block = self.arena.block(0, block_id)
        np.frombuffer(block, np.uint64)[:] = np.random.default_rng(block_id).integers(1 << 60)
        generations = self.arena.generations(0)
        generations[block_id] += 1
        heads = self.layout.groups[0].num_kv_heads
        return BlockRef(block_id, int(generations[block_id]), head_checksums(block, heads))

    def pull(self, run: KvTransferParams, places: Sequence[int]) -> None:
        """Blocks of a hit into these places, verified. Raises RuntimeError."""
        self._num_pulls += 1
        pairs = tuple(map(BlockPull, run.blocks, places))
        heads = self.layout.groups[0].num_kv_heads
        self.puller.submit(Pull(f"p{self._num_pulls}", run.producer, "kv", 0, pairs, heads))
        outcome = self.outcomes.get(timeout=60)
        if outcome.reason:
            raise RuntimeError(f"a hit failed: {outcome.reason}")

    def close(self) -> None:
        self.puller.close()
        self.agent.close()
        self.arena.close()


def commit(keys: Sequence[BlockKey], refs: Sequence[BlockRef]) -> None:
    """Pulled blocks become findable in a worker's pool."""
    pool = BlockPool(len(keys))
    for block_id, ref, key in zip(pool.allocate(len(keys)), refs, keys, strict=True):
        pool.set_checksums(block_id, ref.checksums)
        pool.publish(block_id, key.block_hash, key.parent, key.token_ids, key.media)
