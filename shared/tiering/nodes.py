"""The nodes of a pool of kv_stores: which there are, which of them answer, and whose a key is.

Owns the table of clients and placement by key; not what is asked of them. A key is kept by one node, or by
two; a node that fails is passed over until it answers again. Which nodes there are is ``membership``'s; one
node's trouble is ``remote``'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

from shared.tiering.rendezvous import ranked


class Node(Protocol):
    """A client of one node; see ``remote``. Trouble is a miss, never an error."""

    @property
    def paused(self) -> bool: ...
    async def close(self) -> None: ...


N = TypeVar("N", bound=Node)


class NodeLease(NamedTuple):
    """A lease, and the node that granted it."""

    node: str
    lease_id: str


class NodePool(Generic[N]):
    """Event loop only, but for ``usable``. ``connect`` makes the client of the node at an address."""

    def __init__(self, connect: Callable[[str], N], addresses: Iterable[str], replicas: int = 1) -> None:
        self._connect = connect
        self._replicas = replicas
        self._nodes = {address: connect(address) for address in addresses}
        self._leaving: list[N] = []

    @property
    def addresses(self) -> frozenset[str]:
        """The nodes there are, those that do not answer included."""
        return frozenset(self._nodes)

    @property
    def usable(self) -> bool:
        """Whether any node would be asked now. Any thread."""
        return any(not node.paused for node in self._nodes.values())

    async def set_addresses(self, addresses: Iterable[str]) -> None:
        """These are the nodes from now on. Calls to those that go are waited for."""
        wanted = dict.fromkeys(addresses)
        before = self._nodes
        # A new table, since other threads read the old one.
        self._nodes = {address: before.get(address) or self._connect(address) for address in wanted}
        gone = [node for address, node in before.items() if address not in wanted]
        self._leaving += gone
        for node in gone:
            await node.close()
            self._leaving.remove(node)

    async def close(self) -> None:
        """Close every node's client."""
        await asyncio.gather(*(node.close() for node in (*self._nodes.values(), *self._leaving)))

    def _homes(self, key: bytes) -> list[str]:
        """The nodes of a key, of those that answer: the first is asked first."""
        live = (address for address, node in self._nodes.items() if not node.paused)
        return ranked(live, key)[: self._replicas]
