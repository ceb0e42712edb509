"""The chain of lower tiers: asked in order, written to all, and no tier's fault is ours."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shared.clock import ManualClock
from shared.tiering.chain import NOT_YET, NOWHERE, TierChain
from shared.tiering.demotion import Candidate
from shared.tiering.offload import JobDone, LoadItem, Presence, StoreItem
from shared.tiering.promotion import Load
from tests.fakes.tiers import DictTier, ManualReactor, below

A, B, C = (bytes([n]) * 32 for n in (1, 2, 3))


class BrokenTier(DictTier):
    """Raises whatever it is asked."""

    def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        raise RuntimeError("lookup")

    def submit_store(self, job_id: int, items: Sequence[StoreItem]) -> None:
        raise RuntimeError("store")

    def submit_load(self, job_id: int, items: Sequence[LoadItem]) -> None:
        raise RuntimeError("load")

    def remove(self, keys: Sequence[bytes]) -> None:
        raise RuntimeError("remove")

    def finished(self) -> list[JobDone]:
        raise RuntimeError("finished")


def item(key: bytes) -> StoreItem:
    return StoreItem(key, b"header", memoryview(b"payload"))


@pytest.fixture
def reactor() -> ManualReactor:
    return ManualReactor(ManualClock())


def test_the_nearest_tier_that_has_it_is_the_one(reactor: ManualReactor) -> None:
    near, far = DictTier("near"), DictTier("far")
    chain = TierChain([near, far], reactor.post)
    near.records[A] = far.records[A] = far.records[B] = (b"", b"")
    near.unsure = {C}
    assert chain.where([A, B, C, b"d" * 32]) == [0, 1, NOT_YET, NOWHERE]
    assert far.asked == [B, C, b"d" * 32]


def test_a_store_goes_to_every_tier_that_takes_it_and_ends_with_the_last(reactor: ManualReactor) -> None:
    near, far, closed = DictTier("near"), DictTier("far"), DictTier("closed")
    closed.open, far.held = False, True
    chain = TierChain([near, far, closed], reactor.post)
    ended: list[frozenset[bytes]] = []
    chain.store([item(A)], ended.append)
    reactor.run()
    assert ended == [] and A in near.records
    far.release()
    reactor.run()
    assert ended == [frozenset({A})] and A in far.records and not closed.records
    near.open = far.open = False
    chain.store([item(B)], ended.append)
    assert ended[1:] == [frozenset()]


def test_a_tier_that_raises_has_nothing_and_takes_nothing(reactor: ManualReactor) -> None:
    chain = TierChain([BrokenTier("broken"), good := DictTier("good")], reactor.post)
    good.records[A] = (b"", b"")
    assert chain.where([A, B]) == [1, NOWHERE]
    ended: list[object] = []
    chain.store([item(B)], ended.append)
    chain.load(0, [LoadItem(A, memoryview(bytearray(1)))], ended.append)
    chain.remove(0, [A])
    reactor.run()
    failed, stored = ended
    assert isinstance(failed, JobDone) and not failed.loaded
    assert stored == frozenset({B}) and chain.num_jobs == 0


def test_without_tiers_there_is_nothing(reactor: ManualReactor) -> None:
    chain = TierChain([], reactor.post)
    ended: list[frozenset[bytes]] = []
    chain.store([item(A)], ended.append)
    assert ended == [frozenset()] and chain.where([A]) == [NOWHERE]
    assert chain.is_empty and not chain.holds_anything and not chain.writable


def test_what_cannot_be_a_record_is_left_out() -> None:
    lower, reactor = below(ManualClock(), tier := DictTier())
    pins: list[str] = []

    def candidate(n: int) -> Candidate:
        def make() -> StoreItem:
            if n:
                raise ValueError("too long")
            return item(A)

        return Candidate(make, lambda: pins.append("pin"), lambda: pins.append("unpin"))

    lower.demotions.write([b"a", b"b"], candidate)
    reactor.run()
    assert list(tier.records) == [A] and pins == ["pin", "pin", "unpin", "unpin"]


def test_loads_are_bounded_and_end_in_order() -> None:
    lower, reactor = below(ManualClock(), tier := DictTier(), max_loads=40)
    keys = [bytes([n]) * 32 for n in range(40)]
    tier.records = {key: (b"header", b"x") for key in keys}
    ended: list[int] = []
    loads = [
        Load(key, memoryview(bytearray(1)), lambda header: None, lambda good, n=n: ended.append(n))
        for n, key in enumerate(keys)
    ]
    lower.promotions.begin(0, loads)
    assert lower.promotions.room == 0
    reactor.run()
    assert ended == list(range(40)) and lower.promotions.room == 40
