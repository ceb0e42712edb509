"""The memory registry's own: the exact moment of expiry, and bounds."""

from __future__ import annotations

from shared.clock import ManualClock
from shared.registry.memory import MAX_INCARNATIONS, MemoryRegistry
from tests.unit.rpc.samples import info


async def test_an_entry_lives_for_its_time_after_the_last_announcement() -> None:
    clock = ManualClock()
    registry = MemoryRegistry(clock, ttl_s=5.0)
    await registry.announce(info("a"))
    clock.advance(4.0)
    await registry.announce(info("a"))
    clock.advance(4.5)
    assert await registry.workers() == [info("a")]
    clock.advance(0.5)
    assert await registry.workers() == []


async def test_a_fenced_incarnation_does_not_prolong_the_entry() -> None:
    clock = ManualClock()
    registry = MemoryRegistry(clock, ttl_s=5.0)
    await registry.announce(info("a", "old"))
    await registry.announce(info("a", "new"))
    clock.advance(3.0)
    await registry.announce(info("a", "old"))
    clock.advance(2.0)
    assert await registry.workers() == []


async def test_memory_of_incarnations_is_bounded_and_epochs_still_grow() -> None:
    registry = MemoryRegistry(ManualClock(), ttl_s=5.0)
    epochs = [await registry.announce(info("a", f"i{n}")) for n in range(MAX_INCARNATIONS + 10)]
    assert epochs == list(range(1, MAX_INCARNATIONS + 11))
    assert len(registry._epochs["a"]) == MAX_INCARNATIONS
