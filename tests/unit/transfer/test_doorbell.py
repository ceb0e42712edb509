"""What ends a sleep, and what does not."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from shared.transfer.doorbell import Doorbell


@pytest.fixture
def bell() -> Iterator[Doorbell]:
    made = Doorbell()
    yield made
    made.close()
    made.close()


def test_a_ring_ends_one_sleep_however_often_it_came(bell: Doorbell) -> None:
    bell.ring()
    bell.ring()
    assert bell.sleep(60.0)
    assert not bell.sleep(0.0)


def test_a_ring_ends_the_sleep_that_is_under_way(bell: Doorbell) -> None:
    woken: list[bool] = []
    sleeper = threading.Thread(target=lambda: woken.append(bell.sleep(60.0)))
    sleeper.start()
    bell.ring()
    sleeper.join()
    assert woken == [True]


def test_only_what_is_watched_now_ends_a_sleep(bell: Doorbell) -> None:
    one, other = os.eventfd(1), os.eventfd(0)
    try:
        assert not bell.sleep(0.0)
        bell.watch([one, other])
        assert bell.sleep(60.0)
        assert bell.sleep(60.0)
        bell.watch(iter([other]))
        assert not bell.sleep(0.0)
        os.eventfd_write(other, 1)
        assert bell.sleep(60.0)
        bell.watch([])
        assert not bell.sleep(0.0)
    finally:
        os.close(one)
        os.close(other)
