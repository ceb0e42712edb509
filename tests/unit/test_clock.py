"""Injected time and randomness."""

from __future__ import annotations

import pytest

from shared.clock import CountingEntropy, ManualClock, MonotonicClock, SystemEntropy


def test_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock(10.0)
    assert clock.now() == clock.now() == 10.0
    clock.advance(0.5)
    clock.advance(0)
    assert clock.now() == 10.5


def test_manual_clock_does_not_go_back() -> None:
    clock = ManualClock()
    with pytest.raises(ValueError, match="back"):
        clock.advance(-1e-9)
    assert clock.now() == 0.0


def test_monotonic_clock_never_goes_back() -> None:
    clock = MonotonicClock()
    times = [clock.now() for _ in range(1000)]
    assert times == sorted(times)


def test_system_entropy_has_the_promised_shape() -> None:
    entropy = SystemEntropy()
    ids = {entropy.hex_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(value) == 32 and int(value, 16) >= 0 for value in ids)
    assert all(0 <= entropy.seed() < 1 << 63 for _ in range(100))


def test_counting_entropy_counts() -> None:
    entropy = CountingEntropy(5)
    assert [entropy.seed(), entropy.hex_id(), entropy.seed()] == [5, "0" * 31 + "6", 7]
