"""A sequence's blocks: prefix hits, growth, copy-on-write, forks and the end."""

from __future__ import annotations

import pytest

from shared.errors import InternalError, OutOfBlocks
from shared.kv_cache.block_hash import BlockHasher
from shared.kv_cache.manager import KVCacheManager
from shared.step import BlockCopy
from shared.types.kv import KVCacheSpec
from shared.types.request import MediaItem
from tests.unit.kv_cache.kv_builders import IDENTITY, NARROW, begin, compute, make_hasher, make_manager, run

PROMPT = list(range(100, 110))  # two full blocks of 4, and a tail of 2


def assert_at_rest(manager: KVCacheManager) -> None:
    """Nothing is held by anybody."""
    manager.check_integrity()
    assert manager.open_keys == ()
    assert manager.num_free() == manager.num_blocks()


# Prefix hits.


def test_a_second_prompt_shares_the_full_blocks_of_the_first() -> None:
    manager = make_manager()
    assert run(manager, "a", PROMPT) == 0
    assert run(manager, "b", [*PROMPT[:8], 1, 2]) == 8
    (table_a,), (table_b,) = manager.table("a"), manager.table("b")
    assert table_a[:2] == table_b[:2] and table_a[2] != table_b[2]
    assert manager.num_used() == 4
    manager.close("a")
    manager.close("b")
    assert_at_rest(manager)
    assert manager.num_cached_tokens == 8
    assert run(manager, "c", PROMPT) == 8, "free blocks are still found"


@pytest.mark.parametrize(("limit", "cached"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (99, 8)])
def test_the_hit_is_whole_blocks_within_the_limit(limit: int, cached: int) -> None:
    manager = make_manager()
    run(manager, "a", PROMPT)
    assert manager.open("b", PROMPT, (), "", "", limit) == cached
    assert manager.table_len("b") == cached // 4
    manager.check_integrity()


def test_salt_adapter_and_media_keep_prefixes_apart() -> None:
    manager = make_manager()
    picture = [MediaItem("cat", 2, 3)]
    begin(manager, "a", PROMPT, picture)
    compute(manager, "a", 0, 10)
    assert begin(manager, "same", PROMPT, picture) == 8
    assert begin(manager, "salt", PROMPT, picture, salt="tenant") == 0
    assert begin(manager, "adapter", PROMPT, picture, adapter="lora") == 0
    assert begin(manager, "none", PROMPT) == 0
    assert begin(manager, "dog", PROMPT, [MediaItem("dog", 2, 3)]) == 0
    assert begin(manager, "moved", PROMPT, [MediaItem("cat", 1, 3)]) == 0
    assert begin(manager, "later", PROMPT, [*picture, MediaItem("cat", 6, 1)]) == 4


def test_a_media_item_after_the_prefix_does_not_spoil_it() -> None:
    manager = make_manager()
    run(manager, "a", PROMPT)
    assert begin(manager, "b", PROMPT, [MediaItem("cat", 8, 2)]) == 8


def test_every_group_must_have_the_block() -> None:
    manager = make_manager([8, 8])
    run(manager, "a", PROMPT)
    manager.pool(1).unpublish([manager.table("a")[1][1]])
    assert begin(manager, "b", PROMPT) == 4
    assert [len(table) for table in manager.table("b")] == [1, 1]
    manager.check_integrity()


def test_without_prefix_caching_blocks_are_committed_but_never_found() -> None:
    manager = make_manager(prefix_caching=False)
    begin(manager, "a", PROMPT)
    assert len(compute(manager, "a", 0, 10)) == 2
    assert begin(manager, "b", PROMPT) == 0
    assert manager.num_cached_tokens == 0


def test_reset_forgets_what_was_found_but_not_what_is_held() -> None:
    manager = make_manager()
    run(manager, "a", PROMPT)
    table = manager.table("a")
    manager.reset_prefix_cache()
    assert begin(manager, "b", PROMPT) == 0 and manager.table("a") == table
    manager.append("a", [7, 7])
    compute(manager, "a", 10, 12)
    compute(manager, "b", 0, 10)
    assert begin(manager, "c", [*PROMPT, 7, 7, 7]) == 12, "equal prefixes of different ages join up"
    manager.check_integrity()


# Two groups of different extents.


def test_groups_have_their_own_pools_tables_and_limits() -> None:
    manager = make_manager([8, 3])
    assert (manager.num_blocks(), manager.num_blocks(0), manager.num_blocks(1)) == (11, 8, 3)
    begin(manager, "x", [9])
    manager.reserve("x", 1, writable_from=0)  # shifts the ids of the groups against each other
    pinned, _ = manager.table("x")
    manager.pin(0, pinned)
    manager.close("x")
    begin(manager, "a", PROMPT)
    committed = compute(manager, "a", 0, 10)
    assert [(c.group, c.index) for c in committed] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    narrow, wide = manager.table("a")
    assert len(narrow) == len(wide) == 3 and narrow != wide
    before = (manager.table("a"), manager.num_free(0), manager.num_free(1))
    with pytest.raises(OutOfBlocks):
        manager.reserve("a", 13, writable_from=10)
    assert (manager.table("a"), manager.num_free(0), manager.num_free(1)) == before
    assert manager.close("a", {1: [0]}) == {1: [wide[0]]}
    assert (manager.num_quarantined(0), manager.num_quarantined(1), manager.num_quarantined()) == (0, 1, 1)
    manager.release_quarantined(1, [wide[0]])
    manager.unpin(0, pinned)
    assert_at_rest(manager)


# Growth and copy-on-write.


def test_reserving_covers_every_position_once() -> None:
    manager = make_manager()
    begin(manager, "a", PROMPT)
    for num_tokens, blocks in [(1, 1), (4, 1), (5, 2), (3, 2), (10, 3), (10, 3)]:
        assert manager.reserve("a", num_tokens, writable_from=0) == []
        assert manager.table_len("a") == blocks
    assert manager.table("a", 1) == (manager.table("a")[0][1:],)
    assert manager.num_used() == 3


def test_a_fork_shares_all_and_copies_the_tail_when_it_writes() -> None:
    manager = make_manager()
    run(manager, "a", PROMPT)
    manager.fork("a", "b")
    manager.fork("a", "c")
    (shared,) = manager.table("a")
    assert manager.table("b") == manager.table("c") == (shared,) and manager.num_used() == 3
    (copy,) = manager.reserve("b", 11, writable_from=10)
    (table_b,) = manager.table("b")
    assert copy == BlockCopy(0, shared[2], table_b[2]) and table_b[:2] == shared[:2]
    assert manager.reserve("b", 11, writable_from=10) == [], "the copy is its own"
    assert len(manager.reserve("a", 11, writable_from=10)) == 1
    assert manager.reserve("c", 11, writable_from=10) == [], "the last owner needs no copy"
    assert len({manager.table(key)[0][2] for key in "abc"}) == 3
    for key in "abc":
        manager.close(key)
    assert_at_rest(manager)


def test_forks_go_on_from_the_common_history() -> None:
    manager = make_manager()
    run(manager, "a", PROMPT)
    manager.fork("a", "b")
    for key, token in (("a", 1), ("b", 2)):
        manager.append(key, [token, token])
        (block,) = compute(manager, key, 10, 12)
        assert (block.index, block.token_ids) == (2, (108, 109, token, token))
    assert begin(manager, "c", [*PROMPT, 2, 2, 0]) == 12
    assert manager.table("c")[0] == manager.table("b")[0]


def test_nothing_is_copied_from_a_block_without_valid_positions() -> None:
    manager = make_manager()
    begin(manager, "a", PROMPT)
    manager.reserve("a", 12, writable_from=0)
    manager.fork("a", "b")
    assert manager.reserve("b", 12, writable_from=8) == []
    assert manager.table("a")[0][2] != manager.table("b")[0][2]
    assert manager.table("a")[0][:2] == manager.table("b")[0][:2]


def test_reserving_only_to_read_changes_nothing() -> None:
    manager = make_manager()
    run(manager, "a", PROMPT)
    manager.fork("a", "b")
    assert manager.reserve("b", 10, writable_from=10) == []
    assert manager.table("a") == manager.table("b")


def test_copies_and_growth_together_are_all_or_nothing() -> None:
    manager = make_manager([5])
    run(manager, "a", PROMPT)
    manager.fork("a", "b")
    before = manager.table("b"), manager.num_free()
    with pytest.raises(OutOfBlocks):
        manager.reserve("b", 17, writable_from=10)  # one copy, two new: three of two
    assert (manager.table("b"), manager.num_free()) == before
    assert len(manager.reserve("b", 16, writable_from=10)) == 1
    manager.check_integrity()


def test_writing_again_into_an_own_block_voids_its_hash_and_checksums() -> None:
    manager = make_manager()
    run(manager, "a", PROMPT)
    assert manager.reserve("a", 10, writable_from=5) == []
    (table,) = manager.table("a")
    assert manager.pool(0).checksums(table[1]) == ()
    assert begin(manager, "b", PROMPT) == 4
    assert manager.sealable("a", 10) == [(0, 1, table[1])]
    assert [c.index for c in manager.commit("a", 10, {(0, table[1]): (5,)})] == [1]
    assert begin(manager, "c", PROMPT) == 8


# The end.


def test_blocks_in_flight_outlive_their_sequence_in_quarantine() -> None:
    manager = make_manager([4])
    begin(manager, "a", PROMPT)
    manager.reserve("a", 10, writable_from=0)
    (table,) = manager.table("a")
    assert manager.close("a", {0: [2, 1]}) == {0: [table[1], table[2]]}
    assert (manager.num_free(), manager.num_used(), manager.num_quarantined()) == (2, 0, 2)
    begin(manager, "b", PROMPT)
    with pytest.raises(OutOfBlocks):
        manager.reserve("b", 10, writable_from=0)
    manager.release_quarantined(0, table[1:])
    manager.reserve("b", 10, writable_from=0)
    manager.close("b")
    assert_at_rest(manager)


def test_a_failed_pull_gets_fresh_blocks() -> None:
    manager = make_manager([5])
    begin(manager, "a", PROMPT)
    manager.reserve("a", 10, writable_from=0)
    (old,) = manager.table("a")
    assert manager.replace("a", 0, [2, 0]) == [old[0], old[2]]
    (new,) = manager.table("a")
    assert new[1] == old[1] and not {new[0], new[2]} & set(old)
    assert manager.replace("a", 0, []) == []
    with pytest.raises(OutOfBlocks):
        manager.replace("a", 0, [0])
    with pytest.raises(IndexError):
        manager.replace("a", 0, [3])
    assert manager.table("a") == (new,)
    manager.check_integrity()


def test_pins_outlive_the_sequence() -> None:
    manager = make_manager()
    run(manager, "a", PROMPT)
    (table,) = manager.table("a")
    manager.pin(0, table)
    manager.pin(0, table[:1])
    manager.close("a")
    manager.check_integrity()
    assert manager.num_used() == 3
    manager.unpin(0, table)
    assert manager.num_used() == 1
    manager.unpin(0, table[:1])
    with pytest.raises(ValueError, match="not pinned"):
        manager.unpin(0, table[:1])
    assert_at_rest(manager)


def test_an_invalid_sequence_takes_its_own_blocks_out_of_the_cache() -> None:
    manager = make_manager()
    run(manager, "a", PROMPT[:5])
    assert run(manager, "b", PROMPT) == 4
    manager.invalidate("b")
    manager.append("b", [1, 2])
    assert compute(manager, "b", 10, 12) == []
    manager.close("b")
    assert begin(manager, "c", PROMPT) == 4, "what others hold is theirs"


def test_keys_are_opened_once_and_unknown_ones_are_refused() -> None:
    manager = make_manager()
    begin(manager, "a", PROMPT)
    manager.fork("a", "b")
    assert manager.is_open("a") and not manager.is_open("c") and manager.open_keys == ("a", "b")
    with pytest.raises(ValueError, match="open"):
        begin(manager, "b", PROMPT)
    with pytest.raises(ValueError, match="open"):
        manager.fork("a", "b")
    with pytest.raises(KeyError):
        manager.close("c")
    with pytest.raises(KeyError):
        manager.reserve("c", 1, writable_from=0)
    with pytest.raises(IndexError):
        manager.close("a", {0: [0]})
    assert manager.is_open("a")


def test_spec_hasher_and_pools_must_agree() -> None:
    spec = KVCacheSpec(4, (NARROW,))
    with pytest.raises(ValueError, match="group"):
        KVCacheManager(spec, [4, 4], make_hasher())
    with pytest.raises(ValueError, match="block_size"):
        KVCacheManager(spec, [4], BlockHasher(IDENTITY, 8))


def test_the_integrity_check_sees_an_owner_too_many() -> None:
    manager = make_manager()
    run(manager, "a", PROMPT)
    manager.pool(0).share([manager.table("a")[0][0]])
    with pytest.raises(InternalError, match="owners"):
        manager.check_integrity()
