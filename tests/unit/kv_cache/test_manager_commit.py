"""How blocks become final: sealing, checksums, commit, and what may be handed off."""

from __future__ import annotations

import pytest

from shared.kv_cache.block_pool import CacheObserver
from shared.types.store import tenant_of
from tests.unit.kv_cache.kv_builders import begin, make_hasher, make_manager, run

PROMPT = list(range(100, 110))  # two full blocks of 4, and a tail of 2


def test_blocks_are_sealed_once_when_full_and_the_tail_on_demand() -> None:
    manager = make_manager()
    begin(manager, "a", PROMPT)
    manager.reserve("a", 10, writable_from=0)
    (table,) = manager.table("a")
    assert manager.sealable("a", 3) == []
    assert manager.sealable("a", 6) == [(0, 0, table[0])]
    assert manager.sealable("a", 10, tail=True) == [(0, 1, table[1]), (0, 2, table[2])]
    assert manager.sealable("a", 10, tail=True) == []


def test_blocks_with_checksums_are_not_sealed_again() -> None:
    manager = make_manager()
    run(manager, "a", PROMPT)
    assert begin(manager, "b", PROMPT) == 8
    manager.reserve("b", 10, writable_from=8)
    assert manager.sealable("b", 10, tail=True) == [(0, 2, manager.table("b")[0][2])]


def test_commit_publishes_what_is_full_computed_and_known() -> None:
    manager = make_manager()
    begin(manager, "a", PROMPT[:6])
    manager.reserve("a", 8, writable_from=0)
    (table,) = manager.table("a")
    assert manager.commit("a", 3, {}) == []
    (first,) = manager.commit("a", 8, {(0, table[0]): (1, 2), (0, table[1]): (3, 4), (0, 99): (0,)})
    root = make_hasher().root("", "")
    assert (first.group, first.index, first.block_id) == (0, 0, table[0])
    assert (first.parent, first.token_ids, first.media) == (root, (100, 101, 102, 103), ())
    assert first.block_hash == make_hasher().chain(root, first.token_ids, ())
    assert (first.ref.block_id, first.ref.generation, first.ref.checksums) == (table[0], 1, (1, 2))
    manager.append("a", [7, 8])
    (second,) = manager.commit("a", 8, {})
    assert (second.parent, second.token_ids) == (first.block_hash, (104, 105, 7, 8))
    assert second.ref.checksums == (3, 4), "checksums that came before the tokens are kept"
    assert manager.commit("a", 8, {}) == []


def test_what_is_committed_says_whose_it_is() -> None:
    manager = make_manager()
    for key, salt in (("a", ""), ("b", "mine"), ("c", "mine"), ("d", "other")):
        manager.open(key, PROMPT, (), salt, "", 0)
        manager.reserve(key, 10, writable_from=0)
    tenants = [{c.tenant for c in manager.commit(key, 10, {})} for key in "abcd"]
    assert tenants == [{""}, {tenant_of("mine")}, {tenant_of("mine")}, {tenant_of("other")}]
    manager.fork("b", "twin")
    manager.append("twin", [1, 2])
    manager.reserve("twin", 12, writable_from=10)
    assert [c.tenant for c in manager.commit("twin", 12, {})] == [tenant_of("mine")]
    assert len(set(map(tenant_of, ("", "mine", "other")))) == 3 and "mine" not in tenant_of("mine")


def test_the_sealed_tail_can_be_handed_off_but_is_never_found() -> None:
    manager = make_manager()
    begin(manager, "a", PROMPT)
    manager.reserve("a", 10, writable_from=0)
    sums = {(0, b): (b,) for _, _, b in manager.sealable("a", 10, tail=True)}
    assert [c.index for c in manager.commit("a", 10, sums)] == [0, 1]
    (table,) = manager.table("a")
    assert [(r.block_id, r.checksums) for r in manager.committed("a", 0, 1, 2)] == [
        (table[1], (table[1],)),
        (table[2], (table[2],)),
    ]
    assert manager.pool(0).key(table[2]) is None


def test_a_tail_that_is_written_on_loses_its_checksums_and_is_sealed_again_when_full() -> None:
    manager = make_manager()
    begin(manager, "a", PROMPT)
    manager.reserve("a", 10, writable_from=0)
    manager.commit("a", 10, {(0, b): (b,) for _, _, b in manager.sealable("a", 10, tail=True)})
    manager.append("a", [1, 2])
    manager.reserve("a", 12, writable_from=10)
    with pytest.raises(ValueError, match="not committed"):
        manager.committed("a", 0, 2, 1)
    assert manager.sealable("a", 12) == [(0, 2, manager.table("a")[0][2])]


def test_checksums_of_a_tail_that_the_next_step_already_writes_are_dropped() -> None:
    manager = make_manager()
    begin(manager, "a", PROMPT)
    manager.reserve("a", 10, writable_from=0)
    seals = manager.sealable("a", 10, tail=True)
    manager.reserve("a", 11, writable_from=10)  # planned before the first step's results are here
    manager.commit("a", 10, {(0, b): (b,) for _, _, b in seals})
    (table,) = manager.table("a")
    assert manager.pool(0).checksums(table[1]) == (table[1],)
    assert manager.pool(0).checksums(table[2]) == ()


def test_pulled_blocks_are_committed_with_their_producers_checksums() -> None:
    manager = make_manager()
    begin(manager, "a", PROMPT)
    manager.reserve("a", 10, writable_from=0)
    (table,) = manager.table("a")
    manager.commit("a", 10, {(0, block): (1000 + index,) for index, block in enumerate(table)})
    assert [ref.checksums for ref in manager.committed("a", 0, 0, 3)] == [(1000,), (1001,), (1002,)]
    assert manager.sealable("a", 10, tail=True) == []


def test_a_fork_does_not_seal_again_what_was_sealed_before_it() -> None:
    manager = make_manager()
    begin(manager, "a", PROMPT)
    manager.reserve("a", 10, writable_from=0)
    assert len(manager.sealable("a", 10)) == 2
    manager.fork("a", "b")
    assert manager.sealable("b", 10) == []


def test_a_replaced_block_is_sealed_and_committed_anew() -> None:
    manager = make_manager()
    run(manager, "a", PROMPT)
    manager.replace("a", 0, [1])
    (table,) = manager.table("a")
    assert manager.sealable("a", 10) == [(0, 1, table[1])]
    assert [(c.index, c.block_id) for c in manager.commit("a", 10, {})] == [(1, table[1])]


def test_a_block_that_a_stray_transfer_may_hit_is_not_published() -> None:
    manager = make_manager()
    begin(manager, "a", PROMPT)
    manager.reserve("a", 10, writable_from=0)
    manager.fork("a", "b")
    ((first, *_),) = manager.table("a")
    manager.close("a", {0: [0]})
    manager.commit("b", 10, {})
    assert manager.pool(0).key(first) is None and manager.num_quarantined() == 0
    manager.close("b")
    assert manager.num_quarantined() == 1


def test_what_is_not_reserved_or_committed_is_refused() -> None:
    manager = make_manager()
    begin(manager, "a", PROMPT)
    manager.reserve("a", 10, writable_from=0)
    with pytest.raises(ValueError, match="reserved"):
        manager.commit("a", 13, {})
    with pytest.raises(IndexError):
        manager.committed("a", 0, 2, 2)
    with pytest.raises(ValueError, match="not committed"):
        manager.committed("a", 0, 0, 1)


def test_the_observer_hears_of_group_0_only() -> None:
    class Counts(CacheObserver):
        stored_hashes = 0

        def stored(self, block_hash: bytes) -> None:
            self.stored_hashes += 1

    counts = Counts()
    run(make_manager([8, 8], observer=counts), "a", PROMPT)
    assert counts.stored_hashes == 2
