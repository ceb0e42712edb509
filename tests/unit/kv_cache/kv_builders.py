"""Small specs, hashers and managers for the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence

from shared.kv_cache.block_hash import BlockHasher
from shared.kv_cache.block_pool import CacheObserver
from shared.kv_cache.manager import CommittedBlock, KVCacheManager
from shared.types.identity import IdentityKey
from shared.types.kv import KVCacheSpec, KVGroupSpec
from shared.types.request import MediaItem

BLOCK_SIZE = 4
IDENTITY = IdentityKey(model="m", revision="r", tokenizer="t", kv_dtype="float32")
NARROW = KVGroupSpec(num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32")
WIDE = KVGroupSpec(num_layers=3, num_kv_heads=2, head_dim=8, dtype="float16", window=8)


def make_hasher(block_size: int = BLOCK_SIZE, bits: int = 256) -> BlockHasher:
    return BlockHasher(IDENTITY, block_size, bits=bits)


def make_manager(
    num_blocks: Sequence[int] = (16,),
    *,
    block_size: int = BLOCK_SIZE,
    bits: int = 256,
    prefix_caching: bool = True,
    observer: CacheObserver | None = None,
) -> KVCacheManager:
    groups = (NARROW, WIDE)[: len(num_blocks)]
    return KVCacheManager(
        KVCacheSpec(block_size, groups),
        num_blocks,
        make_hasher(block_size, bits),
        prefix_caching=prefix_caching,
        observer=observer,
    )


def begin(
    manager: KVCacheManager,
    key: str,
    token_ids: Sequence[int],
    media: Sequence[MediaItem] = (),
    salt: str = "",
    adapter: str = "",
) -> int:
    """Open for a prompt of these tokens; at most all but one come from the cache."""
    return manager.open(key, token_ids, media, salt, adapter, len(token_ids) - 1)


def compute(manager: KVCacheManager, key: str, first: int, stop: int) -> list[CommittedBlock]:
    """One step over positions first .. stop - 1, with checksums for all that it completes."""
    manager.reserve(key, stop, writable_from=first)
    checksums = {(group, block_id): (block_id, 7) for group, _, block_id in manager.sealable(key, stop)}
    return manager.commit(key, stop, checksums)


def run(manager: KVCacheManager, key: str, token_ids: Sequence[int], salt: str = "") -> int:
    """Open, compute and commit a whole prompt. Returns the tokens that came from the cache."""
    cached = begin(manager, key, token_ids, salt=salt)
    compute(manager, key, cached, len(token_ids))
    return cached
