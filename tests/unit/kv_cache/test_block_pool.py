"""Ownership, publication, eviction order and quarantine of blocks."""

from __future__ import annotations

import numpy as np
import pytest

from shared.errors import InternalError, OutOfBlocks
from shared.kv_cache.block_pool import BlockPool, CacheObserver

IDS = (1, 2)


class Recorder(CacheObserver):
    def __init__(self) -> None:
        self.heard: list[tuple[str, bytes]] = []

    def stored(self, block_hash: bytes) -> None:
        self.heard.append(("stored", block_hash))

    def removed(self, block_hash: bytes) -> None:
        self.heard.append(("removed", block_hash))


def publish(pool: BlockPool, block_id: int, name: str) -> None:
    pool.publish(block_id, name.encode(), b"root", IDS)


def find(pool: BlockPool, name: str) -> int | None:
    return pool.lookup(name.encode(), b"root", IDS)


def numbers(pool: BlockPool) -> tuple[int, int, int]:
    pool.check_integrity()
    assert pool.num_free + pool.num_used + pool.num_quarantined == pool.num_blocks
    return pool.num_free, pool.num_used, pool.num_quarantined


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3)
    first = pool.allocate(2)
    with pytest.raises(OutOfBlocks):
        pool.allocate(2)
    assert numbers(pool) == (1, 2, 0)
    assert sorted(first + pool.allocate(1)) == [0, 1, 2]
    assert pool.allocate(0) == []


def test_each_reuse_raises_the_generation_in_the_given_table() -> None:
    table = np.zeros(2, np.uint64)
    table[0] = 2**64 - 1
    pool = BlockPool(2, table)
    pool.allocate(2)
    assert table.tolist() == [0, 1], "counters wrap without a warning"
    pool.free([1])
    assert pool.generation(1) == 1, "freed bytes are still what they were"
    assert pool.allocate(1) == [1]
    assert pool.generation(1) == int(table[1]) == 2


def test_checksums_end_with_the_blocks_life() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    assert pool.checksums(block) == ()
    pool.set_checksums(block, (1, 2))
    publish(pool, block, "a")
    pool.free([block])
    assert pool.checksums(block) == (1, 2), "a cached block can be handed on"
    pool.allocate(1)
    assert pool.checksums(block) == ()


def test_a_free_block_is_found_and_resurrected() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    publish(pool, block, "a")
    pool.free([block])
    assert numbers(pool) == (2, 0, 0) and find(pool, "a") == block
    pool.share([block])
    assert pool.ref_count(block) == 1
    assert block not in pool.allocate(1)
    pool.share([block])
    pool.free([block, block])
    assert numbers(pool) == (1, 1, 0)


def test_unhashed_blocks_go_first_then_the_one_freed_longest_ago() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    for block in blocks[:3]:
        publish(pool, block, f"h{block}")
    pool.free([blocks[1]])
    pool.free([blocks[0]])
    pool.free([blocks[3]])
    pool.free([blocks[2]])
    assert pool.allocate(1) == [blocks[3]]
    assert pool.allocate(3) == [blocks[1], blocks[0], blocks[2]]
    assert [find(pool, f"h{block}") for block in blocks[:3]] == [None] * 3
    numbers(pool)


def test_a_freed_table_is_eaten_from_its_tail() -> None:
    pool = BlockPool(3)
    table = pool.allocate(3)
    for block in table:
        publish(pool, block, f"h{block}")
    pool.free(table)
    assert [pool.allocate(1)[0] for _ in table] == table[::-1]


def test_lookup_compares_contents_not_only_the_hash() -> None:
    pool = BlockPool(8)
    blocks = pool.allocate(4)
    contents = [
        (b"p", (1, 2), ()),
        (b"q", (1, 2), ()),
        (b"p", (1, 3), ()),
        (b"p", (1, 2), (("mm", 0),)),
    ]
    for block, content in zip(blocks, contents, strict=True):
        assert pool.lookup(b"same", *content) is None
        pool.publish(block, b"same", *content)
    assert [pool.lookup(b"same", *content) for content in contents] == blocks
    assert pool.lookup(b"same", b"p", (1, 2), (("mm", -1),)) is None
    assert pool.lookup(b"other", *contents[0]) is None


@pytest.mark.parametrize("gone", [0, 1])
def test_twins_are_independent(gone: int) -> None:
    pool = BlockPool(2)
    twins = pool.allocate(2)
    for block in twins:
        publish(pool, block, "a")
    assert find(pool, "a") == twins[0] and pool.key(twins[0]) is pool.key(twins[1])
    pool.free([twins[gone]])
    assert find(pool, "a") == twins[0]
    assert pool.allocate(1) == [twins[gone]]
    assert find(pool, "a") == twins[1 - gone]
    numbers(pool)


def test_the_observer_hears_first_and_last_of_a_hash() -> None:
    recorder = Recorder()
    pool = BlockPool(3, observer=recorder)
    blocks = pool.allocate(3)
    publish(pool, blocks[0], "a")
    publish(pool, blocks[1], "a")
    publish(pool, blocks[1], "a")
    pool.unpublish([blocks[0], blocks[2]])
    assert recorder.heard == [("stored", b"a")]
    pool.free(blocks)
    pool.allocate(3)
    assert recorder.heard == [("stored", b"a"), ("removed", b"a")]


def test_quarantined_blocks_belong_to_nobody_until_released() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    publish(pool, blocks[0], "a")
    pool.quarantine(blocks)
    assert numbers(pool) == (0, 0, 2) and find(pool, "a") is None
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)
    for misuse in (pool.share, pool.free, pool.quarantine):
        with pytest.raises(ValueError, match=r"not used|neither"):
            misuse([blocks[0]])
    pool.release_quarantined(blocks[:1])
    assert numbers(pool) == (1, 0, 1)
    assert pool.allocate(1) == blocks[:1]
    with pytest.raises(ValueError, match="not quarantined"):
        pool.release_quarantined(blocks[:1])


def test_a_shared_block_is_kept_by_its_other_owners_and_then_quarantined() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.share([block, block])
    pool.quarantine([block])
    assert numbers(pool) == (0, 1, 0) and pool.is_held(block)
    with pytest.raises(ValueError, match="quarantined"):
        publish(pool, block, "a")
    pool.quarantine([block])
    pool.free([block])
    assert numbers(pool) == (0, 0, 1)
    pool.release_quarantined([block])
    assert numbers(pool) == (0, 0, 1), "the second transfer may still land"
    pool.release_quarantined([block])
    assert numbers(pool) == (1, 0, 0)


def test_a_hold_that_ends_while_others_own_the_block_leaves_it_to_them() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.share([block])
    pool.quarantine([block])
    pool.release_quarantined([block])
    assert numbers(pool) == (0, 1, 0) and not pool.is_held(block)
    pool.free([block])
    assert numbers(pool) == (1, 0, 0)


def test_unpublishing_a_free_block_makes_it_the_first_to_be_reused() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    for block in blocks:
        publish(pool, block, f"h{block}")
    pool.free(blocks)
    pool.unpublish([blocks[0]])
    assert pool.num_published == 1
    assert pool.allocate(1) == [blocks[0]]
    pool.unpublish_all()
    assert pool.num_published == 0 and find(pool, f"h{blocks[1]}") is None
    numbers(pool)


def test_reopening_voids_hash_and_checksums() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    assert pool.is_writable(block)
    publish(pool, block, "a")
    assert not pool.is_writable(block)
    pool.set_checksums(block, (1,))
    pool.reopen(block)
    assert find(pool, "a") is None and pool.checksums(block) == () and pool.is_writable(block)
    pool.share([block])
    assert not pool.is_writable(block)
    with pytest.raises(ValueError, match="one owner"):
        pool.reopen(block)


def test_misuse_is_refused() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="fewer"):
        pool.allocate(-1)
    for misuse in (pool.share, pool.free):
        with pytest.raises(ValueError, match="block 0"):
            misuse([0])
    with pytest.raises(ValueError, match="free"):
        publish(pool, 0, "a")
    with pytest.raises(ValueError, match="not used"):
        pool.set_checksums(0, (1,))
    (block,) = pool.allocate(1)
    publish(pool, block, "a")
    with pytest.raises(ValueError, match="other contents"):
        publish(pool, block, "b")
    with pytest.raises(ValueError, match="at least one"):
        BlockPool(0)
    with pytest.raises(ValueError, match="generation"):
        BlockPool(2, [0])
    numbers(pool)


def test_the_integrity_check_sees_damage() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    pool._refs[0] = 0
    with pytest.raises(InternalError, match="one state"):
        pool.check_integrity()
