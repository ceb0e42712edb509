"""One try to serve some choices of a request: encode, prefill, decode, and the handoffs between.

Owns the state of the try and what each worker holds for it. A try has one route and one id; what
goes wrong ends the try, and the flight decides about the next one. So nothing here retries.
All methods are called on the event loop; none blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from services.router.choice import Choice
from shared.errors import DeterminismViolation, InternalError, TriptychError, WorkerLost, from_code
from shared.routing.trial import Trial
from shared.routing.workers import Worker
from shared.telemetry.logs import get_logger
from shared.types.request import GenerationRequest
from shared.types.transfer import EcTransferParams, KvTransferParams
from shared.types.worker import (
    AGGREGATED,
    DECODE,
    PREFILL,
    Abort,
    Attach,
    BlocksCommitted,
    Encode,
    Failed,
    HandoffReady,
    Released,
    Reserved,
    Resume,
    Start,
    Tokens,
)

if TYPE_CHECKING:
    from services.router.flight import Flight

logger = get_logger(__name__)


class Route(Struct, frozen=True):
    """The workers of one attempt. ``prefill`` None = ``decode`` serves it alone (aggregated).
    ``encoders`` with the hashes that each is to encode."""

    decode: Worker
    trial: Trial
    prefill: Worker | None = None
    encoders: tuple[tuple[Worker, tuple[str, ...]], ...] = ()


class Attempt:
    """``number`` counts the tries of these choices. ``avoid`` = keys of workers at which earlier
    tries failed; ``not_before`` and ``waiting_since`` (clock seconds) are for who places it."""

    def __init__(
        self,
        flight: Flight,
        attempt_id: str,
        choices: Sequence[Choice],
        number: int = 0,
        avoid: frozenset[str] = frozenset(),
        not_before: float = 0.0,
        waiting_since: float = 0.0,
    ) -> None:
        self.flight = flight
        self.id = attempt_id
        self.number = number
        self.avoid = avoid
        self.not_before = not_before
        self.waiting_since = waiting_since
        self.choices = tuple(choices)
        self.closed = False
        self._open = {choice.index: choice for choice in choices}
        self._route: Route | None = None
        self._request: GenerationRequest | None = None
        self._holders: dict[Worker, set[str]] = {}
        self._encoding: set[Worker] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._embeddings: dict[str, EcTransferParams] = {}
        self._first: dict[int, int] = {}
        self._num_blocks: int | None = None
        self._reserved = False
        self._prefill_due: Start | None = None
        self._resumed = False

    # Out: what the workers are told.

    def begin(self, route: Route, request: GenerationRequest) -> None:
        """Go. ``request`` carries this attempt's id. May end the attempt at once."""
        self._route, self._request = route, request
        for worker in (route.decode, route.prefill):
            if worker is not None:
                worker.attempts[self.id] = self
        for encoder, hashes in route.encoders:
            self._hold(encoder)
            self._encoding.add(encoder)
            self._tasks.append(asyncio.get_running_loop().create_task(self._encode(encoder, hashes)))
        if not route.encoders:
            self._start()

    async def _encode(self, worker: Worker, hashes: tuple[str, ...]) -> None:
        """Raw media first, then the command; an encoder that holds an item already answers cheaply."""
        try:
            for mm_hash in hashes:
                await worker.link.put_media(mm_hash, self.flight.media[mm_hash])
            worker.send(Encode(self.id, hashes, self.flight.traceparent))
        except TriptychError as error:
            self._fail(worker, error)
        except Exception:
            logger.exception("media of a request could not be sent")
            self._fail(worker, InternalError("media could not be sent"))

    def _start(self) -> None:
        route, request = self._route, self._request
        if route is None or request is None:
            return
        embeddings = tuple(self._embeddings[h] for h in dict.fromkeys(m.mm_hash for m in request.media))
        route.trial.begin()
        self._hold(route.decode)
        if route.prefill is None:
            route.decode.send(Start(request, AGGREGATED, embeddings))
            return
        self._hold(route.prefill)
        self._prefill_due = Start(request, PREFILL, embeddings)
        if self._is_roomy(route.decode, request):
            self._start_prefill(route)
        route.decode.send(Start(request, DECODE))

    def _is_roomy(self, decode: Worker, request: GenerationRequest) -> bool:
        """Whether decode will surely reserve at once, so that prefill need not wait for it. Else blocks
        that are held there and blocks that are waited for here could stand in each other's way."""
        coming = sum(1 for a in decode.attempts.values() if isinstance(a, Attempt) and not a._reserved)
        needed = -(-len(request.token_ids) // max(1, decode.info.block_size)) * max(1, coming)
        return decode.status.num_waiting == 0 and decode.status.num_blocks_free >= needed

    def _start_prefill(self, route: Route) -> None:
        start, self._prefill_due = self._prefill_due, None
        if start is not None and route.prefill is not None:
            route.prefill.send(start)

    def _resume(self) -> None:
        """Hand over to decode once the last block and every first token are there."""
        route = self._route
        if self._resumed or route is None or self._num_blocks is None or len(self._first) < len(self.choices):
            return
        self._resumed = True
        tokens = tuple(self._first[c.index] for c in self.choices)
        finished = tuple(c.index not in self._open for c in self.choices)
        route.decode.send(Resume(self.id, tokens, self._num_blocks, finished if any(finished) else ()))

    def leases(self) -> Iterator[tuple[Worker, set[str]]]:
        """Who works for this attempt, and the handoffs that must stay alive there. One that decode has no
        room for is left to its lease: when that ends, the request is placed anew."""
        route = self._route
        unreserved = route.prefill if route is not None and not self._reserved else None
        return ((w, set() if w is unreserved else ids) for w, ids in self._holders.items())

    def close(self) -> None:
        """Tell every holder to stop and forget the attempt. Calling it twice is safe."""
        if self.closed:
            return
        self.closed = True
        for worker in list(self._holders):
            self._release(worker)
        if self._route is not None:
            for carrier in (self._route.decode, self._route.prefill):
                if carrier is not None:
                    carrier.attempts.pop(self.id, None)
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        self.flight.attempt_closed(self)

    def _hold(self, worker: Worker) -> None:
        self._holders[worker] = set()
        worker.attempts[self.id] = self

    def _release(self, worker: Worker, *, abort: bool = True) -> None:
        """``worker`` is not needed any more; ``abort`` unless it ended by itself."""
        if self._holders.pop(worker, None) is None:
            return
        worker.attempts.pop(self.id, None)
        if abort:
            worker.send(Abort(self.id))

    def _release_encoders(self) -> None:
        if self._route is not None and self._route.encoders:
            for worker, _ in self._route.encoders:
                self._release(worker)

    # In: what the workers say.

    def on_tokens(self, worker: Worker, event: Tokens) -> None:
        """Raises DeterminismViolation."""
        route = self._route
        if route is None or worker not in self._holders:
            return
        if event.num_cached_tokens and route.prefill is None:
            self.flight.prefix_cached(self, event.num_cached_tokens)
        if worker is route.prefill:
            self._on_first_token(event)
        elif worker is route.decode:
            self._on_own_token(route, event)

    def _on_first_token(self, event: Tokens) -> None:
        choice = self._open.get(event.choice)
        if choice is None or event.choice in self._first or len(event.token_ids) != 1:
            raise DeterminismViolation(f"choice {event.choice}: prefill sent more than one token")
        self._first[event.choice] = event.token_ids[0]
        if self._route is not None:
            self._route.trial.prefilled()
        self._emit(choice, event)
        if self._open:
            self._resume()
        else:
            self.close()

    def _on_own_token(self, route: Route, event: Tokens) -> None:
        if route.prefill is not None and not self._resumed:
            raise DeterminismViolation("decode went on before the handoff")
        route.trial.decoded(event.first_index)
        if len(self._holders) > 1:
            # Decode goes on from its own memory: producer and encoder are free.
            self._release_encoders()
            if route.prefill is not None:
                self._release(route.prefill)
        choice = self._open.get(event.choice)
        if choice is None:
            return
        self._emit(choice, event)
        if self._open:
            if choice.finish_reason and not choice.worker_finished:
                route.decode.send(Abort(self.id, (choice.index,)))
        else:
            if all(c.worker_finished for c in self.choices):
                self._release(route.decode, abort=False)
            self.close()

    def _emit(self, choice: Choice, event: Tokens) -> None:
        self.flight.emit(choice, event)
        if choice.finish_reason:
            del self._open[choice.index]

    def on_reserved(self, worker: Worker, event: Reserved) -> None:
        """Decode holds the blocks of the prompt."""
        route = self._route
        if route is None or worker is not route.decode or worker not in self._holders:
            return
        self._reserved = True
        route.trial.moves((event.num_blocks - event.num_blocks_held) * route.decode.info.block_size)
        self._start_prefill(route)

    def on_blocks(self, worker: Worker, event: BlocksCommitted) -> None:
        route = self._route
        if route is None or worker is not route.prefill or worker not in self._holders:
            return
        self._holders[worker].add(event.handoff_id)
        params = KvTransferParams(event.handoff_id, worker.info.agent, event.group, event.first, event.blocks)
        route.decode.send(Attach(self.id, params))

    def on_handoff(self, worker: Worker, event: HandoffReady) -> None:
        route = self._route
        if route is None or worker not in self._holders:
            return
        if worker in self._encoding:
            self._on_embeddings(worker, event)
        elif worker is route.prefill:
            self._holders[worker].add(event.handoff_id)
            self._num_blocks = event.num_blocks
            self.flight.prefix_cached(self, event.num_cached_tokens)
            self._release_encoders()
            self._resume()

    def _on_embeddings(self, worker: Worker, event: HandoffReady) -> None:
        sizes = {m.mm_hash: m.num_tokens for m in self._request.media} if self._request else {}
        for params in event.embeddings:
            if sizes.get(params.mm_hash) != params.num_rows:
                self._fail(worker, InternalError("an encoder answered with the wrong number of rows"))
                return
            self._embeddings[params.mm_hash] = params
            self._holders[worker].add(params.handoff_id)
        self._encoding.discard(worker)
        if self._encoding:
            return
        if self._embeddings.keys() != sizes.keys():
            self._fail(worker, InternalError("an encoder left media out"))
            return
        self._start()

    def on_failed(self, worker: Worker, event: Failed) -> None:
        if worker not in self._holders:
            return
        error = from_code(event.code, event.message, event.param or None)
        self._fail(worker, error, retryable=event.retryable)

    def on_released(self, worker: Worker, event: Released) -> None:
        """A worker gave everything back. By itself it may do so only when nothing more is due from it."""
        route = self._route
        if route is None or worker not in self._holders:
            return
        before_handoff = worker is route.prefill and not self._resumed
        if worker is route.decode or worker in self._encoding or before_handoff:
            self._fail(worker, WorkerLost("a worker gave the request up"))
        else:
            self._release(worker, abort=False)

    def worker_lost(self, worker: Worker) -> None:
        """A worker is gone. Ends the attempt unless the others can do without it: an encoder that
        has answered may have been read already, a producer likewise once decode was resumed; if
        they were not, the reader will say so."""
        route = self._route
        if route is None or self.closed:
            return
        started = route.decode in self._holders
        if worker is route.decode or (worker is route.prefill and not self._resumed):
            self._fail(worker, WorkerLost("a worker was lost"), crashed=started)
        elif worker in self._holders and not started:
            self._fail(worker, WorkerLost("a worker was lost"), crashed=worker in self._encoding)
        else:
            self._release(worker, abort=False)

    def _fail(
        self, worker: Worker, error: TriptychError, *, retryable: bool | None = None, crashed: bool = False
    ) -> None:
        if self.closed:
            return
        if retryable is None:
            retryable = error.retryable
        self.close()
        # One that was going down anyway has not crashed.
        crashed = crashed and not worker.status.draining
        self.flight.attempt_failed(self, worker, error, retryable=retryable, crashed=crashed)

    @property
    def open_choices(self) -> list[Choice]:
        """Those that were not finished when the attempt ended."""
        return [c for c in self.choices if not c.finish_reason]
