"""Running one API call against the service: owns merging of prompts, token names, and abort."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.types import Receive

from shared.api.logprobs import listed_ids
from shared.types.inference import Delta, InferenceRequest, InferenceService, Output

T = TypeVar("T")
_Arrival = tuple[int, list[Output] | Exception | None]


async def generate_all(
    service: InferenceService, requests: Sequence[InferenceRequest]
) -> AsyncGenerator[tuple[int, list[Output]], None]:
    """Batches of outputs of every request, each with its request's index. Closing it aborts all; the
    first error ends all and is raised."""
    if len(requests) == 1:
        async with _closing(service.generate(requests[0])) as batches:
            async for batch in batches:
                yield 0, batch
        return
    arrivals: asyncio.Queue[_Arrival] = asyncio.Queue(maxsize=2 * len(requests))
    feeds = [asyncio.create_task(_feed(service, r, i, arrivals)) for i, r in enumerate(requests)]
    try:
        running = len(feeds)
        while running:
            index, item = await arrivals.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for feed in feeds:
            feed.cancel()
        await asyncio.wait(feeds)


async def _feed(
    service: InferenceService, request: InferenceRequest, index: int, arrivals: asyncio.Queue[_Arrival]
) -> None:
    try:
        async with _closing(service.generate(request)) as batches:
            async for batch in batches:
                await arrivals.put((index, batch))
    except Exception as error:  # raised again by the reader of the queue
        await arrivals.put((index, error))
    else:
        await arrivals.put((index, None))


@asynccontextmanager
async def _closing(batches: AsyncIterator[list[Output]]) -> AsyncIterator[AsyncIterator[list[Output]]]:
    """Close the iterator at the end, however it comes."""
    try:
        yield batches
    finally:
        close = getattr(batches, "aclose", None)
        if close is not None:
            await close()


class TokenNames(dict[int, bytes]):
    """The bytes of one model's tokens, as far as they were needed; at most a vocabulary of them."""

    def __init__(self, service: InferenceService, model: str) -> None:
        super().__init__()
        self._service, self._model = service, model

    async def load(self, outputs: Iterable[Output]) -> None:
        """Make sure of every token that a listing of ``outputs`` names."""
        wanted: set[int] = set()
        for output in outputs:
            if isinstance(output, Delta):
                wanted |= listed_ids(output)
        missing = tuple(wanted - self.keys())
        if missing:
            self.update(zip(missing, await self._service.token_text(self._model, missing), strict=True))


async def disconnected(receive: Receive) -> None:
    """Returns when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_unless(gone: Awaitable[None], work: Coroutine[None, None, T]) -> T | None:
    """The result of ``work``; None when ``gone`` came first, and then ``work`` was cancelled and has
    ended."""
    worker, watcher = asyncio.create_task(work), asyncio.ensure_future(gone)
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        return worker.result() if worker.done() else None
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.wait((worker, watcher))
