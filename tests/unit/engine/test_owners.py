"""Whose a request is, and how long it may run unasked."""

from __future__ import annotations

import pytest

from shared.clock import ManualClock
from shared.engine.inbox import Outbox
from shared.engine.owners import Owners
from shared.types.worker import Event, Failed, Released, Status, Tokens, WorkerStatus


class Bench:
    def __init__(self) -> None:
        self.clock = ManualClock(100.0)
        self.outbox = Outbox()
        self.owners = Owners(self.outbox, self.clock, lease_s=30.0, grace_s=5.0)
        self.heard: dict[str, list[Event]] = {"a": [], "b": []}
        for router_id, events in self.heard.items():
            self.outbox.subscribe(router_id, events.extend)

    def expired_after(self, seconds: float) -> list[str]:
        self.clock.advance(seconds)
        return self.owners.expired()


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.owners.begin("r1", "a")
    bench.owners.begin("r2", "b")
    return bench


def test_events_go_to_the_owner_and_status_to_all(bench: Bench) -> None:
    token, status = Tokens("r1", 0, 0, (7,)), Status(WorkerStatus("i"))
    bench.owners.emit(token)
    bench.owners.emit(Tokens("unknown", 0, 0, (7,)))
    bench.outbox.broadcast(status)
    bench.outbox.flush()
    assert bench.heard == {"a": [token, status], "b": [status]}


@pytest.mark.parametrize("last", [Released("r1"), Failed("r1", "c", "m", True)])
def test_the_last_word_ends_ownership_and_lease(bench: Bench, last: Released | Failed) -> None:
    bench.owners.emit(last)
    bench.owners.emit(Released("r1"))
    bench.outbox.flush()
    assert bench.heard["a"] == [last] and len(bench.owners) == 1
    assert bench.expired_after(100.0) == ["r2"]


def test_a_lease_lasts_from_one_renewal_to_the_next(bench: Bench) -> None:
    assert bench.expired_after(29.0) == []
    bench.owners.renew(["r1", "unknown"])
    assert bench.expired_after(1.0) == ["r2"]
    bench.owners.renew(["r2"])  # too late
    assert bench.expired_after(29.0) == ["r1"]
    assert bench.expired_after(100.0) == []


def test_a_lost_router_leaves_its_requests_the_grace(bench: Bench) -> None:
    bench.owners.orphaned("a")
    assert bench.expired_after(4.9) == []
    assert bench.expired_after(0.2) == ["r1"]


def test_a_router_that_comes_back_within_the_grace_keeps_its_requests(bench: Bench) -> None:
    bench.owners.orphaned("a")
    bench.clock.advance(4.0)
    bench.owners.renew(["r1"])
    assert bench.expired_after(25.0) == []


def test_the_grace_never_prolongs_a_lease() -> None:
    owners = Owners(Outbox(), ManualClock(), lease_s=1.0, grace_s=5.0)
    owners.begin("r", "a")
    owners.orphaned("a")
    assert owners._grace_s == 1.0


def test_a_deadline_ends_what_is_still_asked_after(bench: Bench) -> None:
    bench.owners.begin("r3", "a", deadline_s=10.0)
    bench.clock.advance(10.0)
    bench.owners.renew(["r1", "r2", "r3"])
    assert bench.expired_after(4.9) == []  # the router itself acts first
    assert bench.expired_after(0.2) == ["r3"]


def test_a_router_gets_nothing_after_it_has_unsubscribed() -> None:
    outbox, heard = Outbox(), []
    unsubscribe = outbox.subscribe("a", heard.extend)
    outbox.emit("a", Released("r"))
    unsubscribe()
    outbox.flush()
    outbox.broadcast(Status(WorkerStatus("i")))
    outbox.flush()
    assert heard == []
