"""Places, and the queue in front of them."""

from __future__ import annotations

import asyncio

import pytest

from shared.clock import ManualClock
from shared.config.services import LimitsConfig
from shared.errors import DeadlineExceeded, Overloaded
from shared.routing.admission import Admission


def make(running: int = 1, queued: int = 2) -> tuple[Admission, ManualClock]:
    clock = ManualClock()
    return Admission(LimitsConfig(max_running=running, max_queued=queued), clock), clock


async def queue(admission: Admission, deadline: float = 100.0) -> asyncio.Task[None]:
    task = asyncio.create_task(admission.enter(deadline))
    await asyncio.sleep(0)
    return task


async def test_first_come_first_served() -> None:
    admission, _ = make()
    await admission.enter(9.0)
    first, second = await queue(admission), await queue(admission)
    assert admission.num_waiting == 2 and not first.done()
    admission.leave()
    await asyncio.sleep(0)
    await first
    assert not second.done() and admission.num_running == 1
    admission.leave()
    await second
    admission.leave()
    assert (admission.num_running, admission.num_waiting) == (0, 0)


async def test_a_full_queue_refuses_at_once() -> None:
    admission, _ = make(queued=1)
    await admission.enter(9.0)
    waiting = await queue(admission)
    with pytest.raises(Overloaded):
        await admission.enter(9.0)
    admission.leave()
    await waiting
    assert admission.num_running == 1


async def test_a_deadline_passes_in_the_queue() -> None:
    admission, clock = make()
    await admission.enter(9.0)
    late, patient = await queue(admission, 5.0), await queue(admission, 50.0)
    clock.advance(6)
    admission.tick()
    with pytest.raises(DeadlineExceeded):
        await late
    assert not patient.done() and admission.num_waiting == 1
    admission.leave()
    await patient


async def test_who_leaves_the_queue_takes_no_place() -> None:
    admission, _ = make()
    await admission.enter(9.0)
    gone, next_ = await queue(admission), await queue(admission)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    admission.leave()
    await next_
    assert (admission.num_running, admission.num_waiting) == (1, 0)


async def test_a_place_that_comes_as_one_leaves_goes_to_the_next() -> None:
    admission, _ = make()
    await admission.enter(9.0)
    gone, next_ = await queue(admission), await queue(admission)
    admission.leave()  # gives the place to the first ...
    gone.cancel()  # ... which leaves in the same turn
    await asyncio.gather(gone, return_exceptions=True)
    await next_
    admission.leave()
    assert (admission.num_running, admission.num_waiting) == (0, 0)


async def test_draining_lets_nobody_in() -> None:
    admission, _ = make()
    await admission.enter(9.0)
    waiting = await queue(admission)
    admission.drain()
    for turned_away in (waiting, admission.enter(9.0)):
        with pytest.raises(Overloaded) as caught:
            await turned_away
        assert caught.value.code == "shutting_down"
    assert admission.num_running == 1
