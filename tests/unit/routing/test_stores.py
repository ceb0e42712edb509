"""Which kv_stores a router lists: those that say so themselves, and those that the shared registry knows."""

from __future__ import annotations

import pytest
from msgspec import structs

from shared.clock import ManualClock
from shared.routing.stores import KnownStores
from shared.types.identity import IdentityKey
from shared.types.transfer import AgentInfo
from shared.types.worker import WorkerInfo


def store(name: str, incarnation: str = "i", *, epoch: int = 1, kind: str = "kv_store") -> WorkerInfo:
    identity, agent = IdentityKey("m", "r", "t", "uint64"), AgentInfo(name, incarnation, epoch, (), ())
    return WorkerInfo(name, incarnation, kind, f"{name}:{epoch}", "m", identity, agent)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(10.0)


@pytest.fixture
def known(clock: ManualClock) -> KnownStores:
    return KnownStores(clock, 5.0)


def test_other_kinds_are_not_its_business(known: KnownStores) -> None:
    known.announced(store("d", kind="decode"))
    known.registered([store("p", kind="prefill"), store("s")])
    assert known.live() == [store("s")]


def test_an_announcement_counts_for_its_time(known: KnownStores, clock: ManualClock) -> None:
    known.announced(store("a"))
    known.announced(store("b"))
    clock.advance(4.0)
    known.announced(store("b"))
    clock.advance(1.0)
    assert known.live() == [store("b")]


def test_the_registrys_word_counts_until_its_next(known: KnownStores, clock: ManualClock) -> None:
    known.registered([store("a"), store("b")])
    clock.advance(1e6)  # it is silent
    assert known.live() == [store("a"), store("b")]
    known.announced(store("a"))
    known.registered([store("c")])
    assert known.live() == [store("a"), store("c")]


def test_the_newest_incarnation_is_listed_whoever_knows_it(known: KnownStores) -> None:
    old, new = store("a", "old", epoch=1), store("a", "new", epoch=2)
    known.registered([old])
    known.announced(new)
    assert known.live() == [new]
    known.announced(old)
    assert known.live() == [new]
    newest = store("a", "newest", epoch=3)
    known.registered([newest])
    assert known.live() == [newest]


def test_an_epoch_that_grows_is_taken_over(known: KnownStores) -> None:
    known.announced(store("a"))
    known.registered([store("a")])
    grown = structs.replace(store("a"), agent=AgentInfo("a", "i", 4, (), ()))
    known.announced(grown)
    assert known.live() == [grown]


def test_who_says_goodbye_is_forgotten_at_once(known: KnownStores) -> None:
    known.announced(store("a"))
    known.registered([store("a"), store("b")])
    known.withdrawn("a", "another")
    known.withdrawn("nobody", "i")
    assert known.live() == [store("a"), store("b")]
    known.withdrawn("a", "i")
    assert known.live() == [store("b")]
