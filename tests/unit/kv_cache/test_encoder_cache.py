"""Embeddings are found by hash, live while used, and are evicted oldest first."""

from __future__ import annotations

import pytest

from shared.errors import OutOfBlocks
from shared.kv_cache.block_pool import BlockPool
from shared.kv_cache.encoder_cache import PENDING, READY, EncoderCache


def make_cache(num_blocks: int = 4, rows_per_block: int = 8) -> tuple[EncoderCache, BlockPool]:
    pool = BlockPool(num_blocks)
    return EncoderCache(pool, rows_per_block), pool


def put(cache: EncoderCache, mm_hash: str, num_rows: int = 8) -> None:
    """A READY entry without users."""
    cache.allocate(mm_hash, num_rows, "u")
    cache.commit(mm_hash, 1)
    cache.release(mm_hash, "u")


def test_an_entry_is_pending_until_committed_and_found_by_everybody() -> None:
    cache, pool = make_cache()
    entry = cache.allocate("h", 17, "a")
    assert (entry.state, entry.num_rows, len(entry.block_ids), entry.checksum) == (PENDING, 17, 3, 0)
    assert cache.acquire("h", "b") == entry
    ready = cache.commit("h", 99)
    assert (ready.state, ready.checksum, ready.block_ids) == (READY, 99, entry.block_ids)
    assert cache.get("h") == ready and cache.users("h") == {"a", "b"}
    assert cache.acquire("unknown", "a") is None and cache.users("unknown") == frozenset()
    assert cache.num_rows == 17 and len(cache) == 1 and pool.num_used == 3
    cache.check_integrity()


def test_an_entry_without_users_stays_until_its_blocks_are_needed() -> None:
    cache, _ = make_cache(num_blocks=3)
    for mm_hash in ("old", "middle", "new"):
        put(cache, mm_hash)
    cache.acquire("old", "x")
    cache.release("old", "x")  # used last now
    cache.allocate("next", 8, "y")
    assert cache.get("middle") is None
    assert cache.get("old") is not None and cache.get("new") is not None
    cache.check_integrity()


def test_entries_in_use_or_pending_are_never_evicted() -> None:
    cache, pool = make_cache(num_blocks=3)
    put(cache, "idle")
    put(cache, "used")
    cache.acquire("used", "x")
    cache.allocate("pending", 8, "y")
    cache.release("pending", "y")
    with pytest.raises(OutOfBlocks):
        cache.allocate("big", 9, "z")
    assert cache.get("idle") is not None, "a failed allocation evicts nothing"
    cache.allocate("small", 8, "z")
    assert cache.get("idle") is None and cache.get("used") is not None and cache.get("pending") is not None
    assert pool.num_free == 0
    cache.check_integrity()


def test_release_is_idempotent_and_ignores_strangers() -> None:
    cache, _ = make_cache()
    cache.allocate("h", 1, "a")
    for user in ("stranger", "a", "a"):
        cache.release("h", user)
    cache.release("unknown", "a")
    assert cache.users("h") == frozenset()
    cache.check_integrity()


def test_a_failed_entry_is_forgotten_with_its_users() -> None:
    cache, pool = make_cache()
    cache.allocate("h", 8, "a")
    assert cache.fail("h", quarantine=False) == ()
    assert cache.get("h") is None and pool.num_free == 4
    cache.release("h", "a")
    cache.allocate("h", 8, "b")
    assert cache.users("h") == {"b"}
    cache.check_integrity()


def test_a_transfer_that_may_still_land_keeps_its_blocks_in_quarantine() -> None:
    cache, pool = make_cache()
    entry = cache.allocate("h", 16, "a")
    held = cache.fail("h", quarantine=True)
    assert held == entry.block_ids
    assert (pool.num_free, pool.num_used, pool.num_quarantined) == (2, 0, 2)
    with pytest.raises(OutOfBlocks):
        cache.allocate("other", 17, "a")
    cache.release_quarantined(held)
    cache.allocate("other", 17, "a")
    cache.check_integrity()


def test_misuse_is_refused() -> None:
    cache, _ = make_cache()
    cache.allocate("h", 8, "a")
    with pytest.raises(ValueError, match="new mm_hash"):
        cache.allocate("h", 8, "b")
    with pytest.raises(ValueError, match="one row"):
        cache.allocate("none", 0, "b")
    cache.commit("h", 1)
    with pytest.raises(ValueError, match="not pending"):
        cache.commit("h", 1)
    with pytest.raises(ValueError, match="not pending"):
        cache.fail("h", quarantine=False)
    with pytest.raises(KeyError):
        cache.commit("unknown", 1)
    with pytest.raises(ValueError, match="positive"):
        EncoderCache(BlockPool(1), 0)
    cache.check_integrity()
