"""Which kv_store nodes a worker uses: those of its configuration, and those that its routers list.

Owns asking the routers. What they know is a hint: a router that is silent, or has just started, takes no node
away, so that with all of them down, and Redis behind them, a worker goes on with the nodes it knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

from shared.errors import TriptychError
from shared.types.worker import WorkerInfo, WorkerStatus

#: Between two rounds of asking.
ASK_S = 2.0
#: A node that is not configured goes when every router has answered without it so many times running.
ROUNDS_WITHOUT = 3
MAX_NODES = 64


class Router(Protocol):
    """What is asked; see ``ControlClient``. ``workers`` raises TriptychError."""

    async def workers(self) -> list[tuple[WorkerInfo, WorkerStatus | None]]: ...
    async def close(self) -> None: ...


class Nodes(Protocol):
    """Whose nodes are kept; see ``NodePool``."""

    async def set_addresses(self, addresses: Iterable[str]) -> None: ...


class Membership:
    """Keeps the pool's nodes: always the ``configured`` ones, and stores of ``model`` that routers list."""

    def __init__(self, pool: Nodes, configured: Sequence[str], routers: Sequence[Router], model: str) -> None:
        self._pool = pool
        self._configured = tuple(configured)
        self._routers = tuple(routers)
        self._model = model
        #: Address -> rounds since a router listed it.
        self._listed: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to ask; needs a running event loop."""
        if self._routers:
            self._task = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """Stop asking. The pool stays as it is."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*(router.close() for router in self._routers))

    async def refresh(self) -> None:
        """Ask every router once, and tell the pool."""
        answers = await asyncio.gather(*(self._ask(router) for router in self._routers))
        if None not in answers:
            aged = {address: rounds + 1 for address, rounds in self._listed.items()}
            self._listed = {address: n for address, n in aged.items() if n < ROUNDS_WITHOUT}
        for answer in answers:
            self._listed.update(dict.fromkeys(answer or (), 0))
        addresses = dict.fromkeys((*self._configured, *sorted(self._listed)))
        await self._pool.set_addresses(list(addresses)[:MAX_NODES])

    async def _keep(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(ASK_S)

    async def _ask(self, router: Router) -> list[str] | None:
        try:
            listed = await router.workers()
        except TriptychError:
            return None
        return [info.address for info, _ in listed if info.kind == "kv_store" and info.model == self._model]
