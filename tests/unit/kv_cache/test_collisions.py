"""Look-ups that meet other content under the same hash are counted."""

from __future__ import annotations

from shared.kv_cache.block_pool import BlockPool
from shared.telemetry.metrics import HASH_COLLISIONS


def count() -> float:
    return float(HASH_COLLISIONS._value.get())


def test_a_look_up_counts_once_when_it_meets_other_content() -> None:
    pool, root = BlockPool(4), b"r" * 32
    blocks = pool.allocate(3)
    before = count()
    for block_id, token in zip(blocks[:2], (1, 2), strict=True):
        pool.publish(block_id, b"h", root, [token])
    assert count() - before == 1, "the second met the first"
    assert pool.lookup(b"h", root, [1]) == blocks[0]
    assert count() - before == 1, "the first of its bucket met nobody"
    assert pool.lookup(b"h", root, [2]) == blocks[1]
    assert pool.lookup(b"h", root, [3]) is None
    assert count() - before == 3
    assert pool.lookup(b"other", root, [1]) is None
    assert count() - before == 3
