"""A lease ends by the injected clock alone, and leaves the table exactly once."""

from __future__ import annotations

import pytest

from shared.clock import ManualClock
from shared.kv_cache.leases import LeaseTable


def test_a_lease_holds_until_its_time_is_over() -> None:
    clock = ManualClock()
    leases = LeaseTable(clock, ttl_s=30)
    leases.grant("a")
    clock.advance(29.5)
    assert leases.holds("a") and leases.expired() == []
    clock.advance(0.5)
    assert not leases.holds("a")
    assert leases.expired() == ["a"]
    assert leases.expired() == [] and len(leases) == 0


def test_renewal_starts_the_leases_own_time_anew() -> None:
    clock = ManualClock()
    leases = LeaseTable(clock, ttl_s=30)
    leases.grant("short", ttl_s=2)
    clock.advance(1)
    assert leases.renew("short")
    clock.advance(1.5)
    assert leases.expired() == []
    clock.advance(0.5)
    assert leases.expired() == ["short"]


def test_a_lease_whose_time_is_over_is_not_revived() -> None:
    clock = ManualClock()
    leases = LeaseTable(clock, ttl_s=1)
    leases.grant("a")
    clock.advance(1)
    assert not leases.renew("a")
    assert leases.expired() == ["a"]
    assert not leases.renew("a") and not leases.renew("never")


def test_release_and_expiry_give_a_lease_away_once_in_all() -> None:
    clock = ManualClock()
    leases = LeaseTable(clock, ttl_s=1)
    for lease in ("released", "late", "expired"):
        leases.grant(lease)
    assert leases.release("released") and not leases.release("released")
    clock.advance(5)
    assert leases.release("late")
    assert leases.expired() == ["expired"]
    assert not leases.release("expired")


def test_granting_again_starts_anew_with_the_new_time() -> None:
    clock = ManualClock()
    leases = LeaseTable(clock, ttl_s=10)
    leases.grant("a")
    leases.grant("a", ttl_s=1)
    assert len(leases) == 1
    clock.advance(1)
    assert leases.expired() == ["a"]


def test_the_earliest_of_many_is_found_after_others_ended() -> None:
    clock = ManualClock()
    leases = LeaseTable(clock, ttl_s=10)
    for ttl in (5, 1, 3):
        leases.grant(str(ttl), ttl_s=ttl)
    seen = []
    for _ in range(6):
        clock.advance(1)
        seen.append(leases.expired())
    assert seen == [["1"], [], ["3"], [], ["5"], []]


@pytest.mark.parametrize("ttl_s", [0, -1])
def test_a_lease_needs_some_time(ttl_s: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        LeaseTable(ManualClock(), ttl_s=ttl_s)
    with pytest.raises(ValueError, match="positive"):
        LeaseTable(ManualClock(), ttl_s=1).grant("a", ttl_s=ttl_s)
