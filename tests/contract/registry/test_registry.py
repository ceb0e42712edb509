"""What every registry promises."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from shared.registry.base import Registry
from shared.types.worker import WorkerInfo
from tests.contract.registry.harness import Harness
from tests.unit.rpc.samples import info


@pytest.fixture
async def registry(harness: Harness) -> AsyncIterator[Registry]:
    opened = harness.open()
    yield opened
    await opened.close()


async def test_an_empty_registry_lists_nobody(registry: Registry) -> None:
    assert await registry.workers() == []


async def test_announced_workers_are_listed_by_id(registry: Registry) -> None:
    for worker_id in ("b", "a", "c:*/ä"):
        assert await registry.announce(info(worker_id)) == 1
    assert await registry.workers() == [info("a"), info("b"), info("c:*/ä")]


async def test_announcing_again_keeps_the_epoch_and_updates_the_entry(registry: Registry) -> None:
    assert await registry.announce(info("a")) == 1
    changed: WorkerInfo = msgspec.structs.replace(info("a"), address="127.0.0.1:2")
    assert await registry.announce(changed) == 1
    assert await registry.workers() == [changed]


async def test_each_new_incarnation_gets_a_higher_epoch_and_the_entry(registry: Registry) -> None:
    assert [await registry.announce(info("a", f"i{n}")) for n in range(5)] == [1, 2, 3, 4, 5]
    assert await registry.workers() == [info("a", "i4")]


async def test_an_old_incarnation_stays_fenced(registry: Registry) -> None:
    await registry.announce(info("a", "old"))
    await registry.announce(info("a", "new"))
    assert await registry.announce(info("a", "old")) == 1
    assert await registry.workers() == [info("a", "new")]


async def test_epochs_of_different_workers_are_independent(registry: Registry) -> None:
    await registry.announce(info("a", "i0"))
    await registry.announce(info("a", "i1"))
    assert await registry.announce(info("b", "i0")) == 1


async def test_an_epoch_given_elsewhere_is_never_undercut(registry: Registry) -> None:
    assert await registry.announce(info("a", "i0", epoch=7)) == 7
    assert await registry.announce(info("a", "i1")) == 8
    assert await registry.announce(info("a", "i2", epoch=3)) == 9


async def test_withdrawn_workers_are_gone_and_may_return(registry: Registry) -> None:
    await registry.announce(info("a"))
    await registry.withdraw("a", "i0")
    assert await registry.workers() == []
    assert await registry.announce(info("a")) == 1
    assert await registry.workers() == [info("a")]


async def test_withdrawing_an_old_incarnation_or_a_stranger_changes_nothing(registry: Registry) -> None:
    await registry.announce(info("a", "old"))
    await registry.announce(info("a", "new"))
    await registry.withdraw("a", "old")
    await registry.withdraw("nobody", "i0")
    assert await registry.workers() == [info("a", "new")]


async def test_silent_workers_expire_but_their_epochs_do_not(harness: Harness, registry: Registry) -> None:
    await registry.announce(info("a", "i0"))
    await harness.expire()
    assert await registry.workers() == []
    assert await registry.announce(info("a", "i1")) == 2
    assert await registry.announce(info("a", "i0")) == 1


async def test_a_second_view_sees_the_same(harness: Harness, registry: Registry) -> None:
    other = harness.open()
    await registry.announce(info("a", "i0"))
    assert await other.announce(info("a", "i1")) == 2
    assert await registry.workers() == await other.workers() == [info("a", "i1")]
    await other.close()


async def test_closing_twice_is_safe(harness: Harness) -> None:
    opened = harness.open()
    await opened.close()
    await opened.close()
