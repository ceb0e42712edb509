"""What the parts of the store's bench share: layouts, and chains of block keys. Owns no measuring."""

from __future__ import annotations

import random

from shared.kv_cache.block_hash import BlockHasher
from shared.types.identity import IdentityKey, LayoutSpec
from shared.types.kv import KVGroupSpec
from shared.types.store import BlockKey

IDENTITY = IdentityKey("bench", "r", "t", "float32")
#: SmolLM2-135M in fp32, 16 tokens: 737,280 bytes a block.
LARGE = LayoutSpec((KVGroupSpec(30, 3, 64, "float32"),), 16)
SMALL = LayoutSpec((KVGroupSpec(1, 1, 16, "uint64"),), 16)
PREFIX = 64


def chain(hasher: BlockHasher, tokens: list[int]) -> list[BlockKey]:
    return [BlockKey(0, *block) for block in hasher.prompt(tokens)]


def tokens_of(rng: random.Random, num_blocks: int) -> list[int]:
    return [rng.randrange(49_152) for _ in range(16 * num_blocks)]
