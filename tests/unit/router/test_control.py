"""Announcements: epochs first, then the stream."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from services.router.control import SOON_S, RouterControl
from shared.registry.base import Registry, RegistryUnavailable
from shared.registry.memory import MemoryRegistry
from shared.routing.stores import KnownStores
from shared.types.worker import WorkerInfo


def with_epoch(info: WorkerInfo, epoch: int, **changes: Any) -> WorkerInfo:
    return structs.replace(info, agent=structs.replace(info.agent, epoch=epoch), **changes)


def control_of(cluster: Any, local: Registry, remote: Registry) -> RouterControl:
    return RouterControl(cluster.dispatcher.workers, KnownStores(cluster.clock, 5.0), local, remote, 1.0)


class Down(MemoryRegistry):
    """A registry that never answers."""

    async def workers(self) -> list[WorkerInfo]:
        raise RegistryUnavailable

    async def announce(self, info: WorkerInfo) -> int:
        raise RegistryUnavailable

    async def withdraw(self, worker_id: str, incarnation: str) -> None:
        raise RegistryUnavailable


async def test_a_worker_is_dialled_once_it_carries_its_epoch(make_cluster: Any) -> None:
    cluster = await make_cluster("d")
    local = MemoryRegistry(cluster.clock, 5.0)
    control = control_of(cluster, local, local)
    await cluster.dispatcher.workers.close()
    announced = cluster.d0.info
    assert await control.announce(with_epoch(announced, 0)) == (1, SOON_S)
    await cluster.settle()
    assert not control.workers()
    cluster.clock.advance(1)
    assert await control.announce(with_epoch(announced, 1)) == (1, 1.0)
    await cluster.settle()
    ((listed, status),) = control.workers()
    assert listed.worker_id == "d0" and status is not None
    await control.withdraw("d0", announced.incarnation)
    assert not control.workers()


async def test_the_higher_epoch_of_two_registries_counts(make_cluster: Any) -> None:
    cluster = await make_cluster("")
    local, remote = MemoryRegistry(cluster.clock, 5.0), MemoryRegistry(cluster.clock, 5.0)
    control = control_of(cluster, local, remote)
    worker = cluster.add("decode", "d0")
    await remote.announce(with_epoch(worker.info, 6, incarnation="earlier"))
    epoch, soon = await control.announce(worker.info)
    assert (epoch, soon) == (7, SOON_S)


async def test_without_the_shared_registry_serving_goes_on(make_cluster: Any) -> None:
    cluster = await make_cluster("d")
    local, down = MemoryRegistry(cluster.clock, 5.0), Down(cluster.clock, 5.0)
    control = control_of(cluster, local, down)
    assert await control.announce(cluster.d0.info) == (1, 1.0)
    await control.withdraw("nobody", "x")
    assert len(control.workers()) == 1


async def test_stores_are_listed_but_not_routed_to(make_cluster: Any) -> None:
    cluster = await make_cluster("d")
    local = MemoryRegistry(cluster.clock, 5.0)
    control = control_of(cluster, local, local)
    store = structs.replace(cluster.d0.info, worker_id="kv", kind="kv_store")
    await control.announce(store)
    assert control.workers()[1:] == [(store, None)] and len(cluster.dispatcher.workers) == 1
    await control.withdraw("kv", "other")
    await control.withdraw("kv", store.incarnation)
    assert len(control.workers()) == 1


async def test_whom_the_shared_registry_lists_is_dialled_or_if_a_store_listed(make_cluster: Any) -> None:
    cluster = await make_cluster("")
    local, remote = MemoryRegistry(cluster.clock, 5.0), MemoryRegistry(cluster.clock, 5.0)
    control = control_of(cluster, local, remote)
    worker = cluster.add("decode", "d0")
    store = structs.replace(worker.info, worker_id="kv", kind="kv_store")
    await remote.announce(worker.info)
    await remote.announce(store)
    await control.poll()
    await cluster.settle()
    assert [info.worker_id for info, _ in control.workers()] == ["d0", "kv"]
    cluster.clock.advance(5.0)
    await control.poll()
    assert [info.worker_id for info, _ in control.workers()] == ["d0"], "its stream says that it is alive"


async def test_a_registry_that_cannot_be_reached_is_no_news(make_cluster: Any) -> None:
    cluster = await make_cluster("d")
    local, down = MemoryRegistry(cluster.clock, 5.0), Down(cluster.clock, 5.0)
    control = control_of(cluster, local, down)
    await control.announce(structs.replace(cluster.d0.info, worker_id="kv", kind="kv_store"))
    await control.poll()
    assert [info.worker_id for info, _ in control.workers()] == ["d0", "kv"]


async def test_a_store_that_falls_silent_is_listed_no_more(make_cluster: Any) -> None:
    cluster = await make_cluster("")
    local = MemoryRegistry(cluster.clock, 5.0)
    control = control_of(cluster, local, local)
    store = structs.replace(cluster.add("decode", "d0").info, worker_id="kv", kind="kv_store")
    await control.announce(store)
    await control.poll()
    cluster.clock.advance(4.9)
    assert len(control.workers()) == 1
    cluster.clock.advance(0.1)
    await control.poll()
    assert control.workers() == []
