"""The byte counter waits for removals that come before it and for no others; the switch tries one record."""

from __future__ import annotations

import threading

from shared.clock import ManualClock
from shared.tiering.disk_room import Room, WriteSwitch


class Taker:
    """Takes room in a thread of its own."""

    def __init__(self, room: Room, nbytes: int, ticket: int) -> None:
        self._answers: list[bool] = []
        self._thread = threading.Thread(target=lambda: self._answers.append(room.take(nbytes, ticket)))
        self._thread.start()

    def answer(self) -> bool:
        self._thread.join(30)
        return self._answers[0]


def test_taking_and_giving() -> None:
    room = Room(10, 4)
    assert room.take(6, 0)
    assert not room.take(1, 0)
    room.give(3)
    assert room.take(3, 0)
    assert room.used_bytes == room.capacity_bytes == 10


def test_an_earlier_removal_is_waited_for() -> None:
    room = Room(10, 10)
    first, second = room.leaving(), room.leaving()
    taker = Taker(room, 4, second)
    room.begun(first)
    room.left(2)
    room.begun(second)
    room.left(2)
    assert taker.answer()
    assert room.used_bytes == 10


def test_an_earlier_removal_that_fails_is_no_longer_waited_for() -> None:
    room = Room(10, 10)
    ticket = room.leaving()
    taker = Taker(room, 4, ticket)
    room.begun(ticket)
    room.left(0)
    assert not taker.answer()


def test_a_later_removal_is_waited_for_only_once_it_has_begun() -> None:
    """It may stand in the queue behind whoever would wait for it."""
    room = Room(10, 10)
    before = room.ticket
    later = room.leaving()
    assert not room.take(4, before)
    room.begun(later)
    taker = Taker(room, 4, before)
    room.left(4)
    assert taker.answer()


def test_several_that_wait_do_not_take_more_than_there_is() -> None:
    room = Room(10, 10)
    tickets = [room.leaving() for _ in range(5)]
    takers = [Taker(room, 4, tickets[-1]) for _ in range(3)]
    for ticket in tickets:
        room.begun(ticket)
        room.left(2)
    assert sorted(taker.answer() for taker in takers) == [False, True, True]
    assert room.used_bytes == 8


def test_writes_under_way_at_the_first_failure_count_with_it() -> None:
    clock = ManualClock()
    switch = WriteSwitch(clock)
    assert switch.begin() and switch.begin() and switch.begin()
    assert switch.failed()
    assert not switch.failed()
    assert not switch.on and not switch.begin()
    clock.advance(1.0)
    assert switch.begin()
    assert not switch.on and not switch.begin()  # one trial at a time
    assert not switch.failed()
    clock.advance(1.9)
    assert not switch.on
    clock.advance(0.1)
    assert switch.begin()
    switch.ended(written=False)  # the record's own fault says nothing of the medium
    assert switch.begin()
    switch.ended(written=True)
    assert switch.begin() and switch.begin()
    assert switch.failed()


def test_a_write_that_ends_well_after_a_failure_of_another_is_no_trial() -> None:
    switch = WriteSwitch(clock := ManualClock())
    assert switch.begin() and switch.begin()
    assert switch.failed()
    switch.ended(written=True)
    assert not switch.on
    clock.advance(1.0)
    assert switch.begin()
    switch.ended(written=True)
    assert switch.begin() and switch.begin()
