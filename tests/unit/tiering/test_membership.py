"""Which nodes a worker knows: the configured ones always, others as long as routers do not deny them."""

from __future__ import annotations

import asyncio

from shared.errors import InternalError
from shared.tiering.membership import MAX_NODES, ROUNDS_WITHOUT, Membership
from shared.tiering.pool import StorePool
from shared.types.identity import IdentityKey
from shared.types.transfer import AgentInfo
from shared.types.worker import WorkerInfo, WorkerStatus
from tests.unit.tiering.test_pool import Node


def store(address: str, kind: str = "kv_store", model: str = "m") -> WorkerInfo:
    identity = IdentityKey(model, "r", "t", "uint64")
    return WorkerInfo(address, "i", kind, address, model, identity, AgentInfo(address, "i", 1, (), ()))


class Router:
    """Lists what the test says; None: does not answer."""

    def __init__(self, *listed: WorkerInfo) -> None:
        self.listed: tuple[WorkerInfo, ...] | None = listed
        self.asked = asyncio.Event()
        self.closed = False

    async def workers(self) -> list[tuple[WorkerInfo, WorkerStatus | None]]:
        self.asked.set()
        if self.listed is None:
            raise InternalError("down")
        return [(info, None) for info in self.listed]

    async def close(self) -> None:
        self.closed = True


def membership(pool: StorePool, *routers: Router) -> Membership:
    return Membership(pool, ("s:1",), routers, "m")


async def test_stores_that_routers_list_join_the_configured_ones() -> None:
    pool = StorePool(Node, ("s:1",))
    first = Router(store("x:1"), store("s:1"), store("d:1", kind="decode"), store("o:1", model="other"))
    await membership(pool, first, Router(store("y:1"))).refresh()
    assert pool.addresses == {"s:1", "x:1", "y:1"}


async def test_a_store_goes_when_all_routers_have_denied_it_several_times() -> None:
    pool = StorePool(Node, ("s:1",))
    first, second = Router(store("x:1")), Router(store("x:1"))
    kept = membership(pool, first, second)
    await kept.refresh()
    first.listed = ()
    for _ in range(2 * ROUNDS_WITHOUT):
        await kept.refresh()
    assert "x:1" in pool.addresses, "one router still lists it"
    second.listed = None
    for _ in range(2 * ROUNDS_WITHOUT):
        await kept.refresh()
    assert "x:1" in pool.addresses, "the other one may know it"
    second.listed = ()
    for _ in range(ROUNDS_WITHOUT - 1):
        await kept.refresh()
        assert "x:1" in pool.addresses, "a router that has just started knows nobody"
    await kept.refresh()
    assert pool.addresses == {"s:1"}


async def test_with_every_router_down_the_last_nodes_stay() -> None:
    pool = StorePool(Node, ("s:1",))
    router = Router(store("x:1"))
    kept = membership(pool, router)
    await kept.refresh()
    router.listed = None
    for _ in range(3 * ROUNDS_WITHOUT):
        await kept.refresh()
    assert pool.addresses == {"s:1", "x:1"}


async def test_their_number_is_bounded() -> None:
    pool = StorePool(Node, ("s:1",))
    await membership(pool, Router(*(store(f"x:{n}") for n in range(2 * MAX_NODES)))).refresh()
    assert len(pool.addresses) == MAX_NODES and "s:1" in pool.addresses


async def test_it_asks_by_itself_until_closed() -> None:
    pool = StorePool(Node, ())
    router = Router(store("x:1"))
    kept = membership(pool, router)
    kept.start()
    async with asyncio.timeout(5):
        await router.asked.wait()
        while "x:1" not in pool.addresses:
            await asyncio.sleep(0)
    await kept.close()
    assert router.closed
