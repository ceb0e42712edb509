"""The engine of an encoder: media in, embeddings held under a lease until they were read.

One thread of its own, like ``EngineCore``; a step is one batch of media items. An item is encoded
once however many requests ask for it, and stays findable by hash until its room is needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import Struct

from shared.clock import Clock
from shared.engine.embedding_store import EmbeddingLink
from shared.engine.inbox import Inbox, Outbox
from shared.engine.owners import Owners
from shared.errors import NotFound, OutOfBlocks, Overloaded, TriptychError
from shared.failpoints import Failpoints
from shared.kv_cache.block_pool import BlockPool
from shared.kv_cache.encoder_cache import READY, EncoderCache
from shared.kv_cache.leases import LeaseTable
from shared.runner.base import EncoderRunner
from shared.scheduler.encoder_scheduler import EncoderScheduler
from shared.step import EncodeItem
from shared.telemetry import metrics
from shared.telemetry.tracing import Span, Tracer
from shared.types.transfer import AgentInfo, EcTransferParams
from shared.types.worker import (
    Abort,
    Command,
    Drain,
    Encode,
    Event,
    Failed,
    HandoffReady,
    Released,
    Renew,
    Status,
    WorkerStatus,
)


class Prepared(Struct, frozen=True):
    """A media item ready for the runner (see EncodeItem)."""

    data: bytes
    shape: tuple[int, ...]
    num_rows: int


class MediaPreparer(Protocol):
    """Turns raw media into runner input, off the engine thread."""

    def prepare(self, data: bytes, done: Callable[[Prepared | TriptychError], None]) -> None:
        """Call ``done`` once, from any thread."""
        ...

    async def close(self) -> None:
        """End what was started for it. On the event loop."""
        ...


@dataclass(frozen=True)
class EncoderParts:
    """What the composition root puts together. ``agent`` is read at each handoff, because its epoch
    is learned after the start."""

    scheduler: EncoderScheduler
    cache: EncoderCache
    runner: EncoderRunner
    preparer: MediaPreparer
    leases: LeaseTable
    agent: Callable[[], AgentInfo]
    pool: BlockPool
    row_bytes: int
    dtype: str
    max_held_media_bytes: int
    tracer: Tracer
    clock: Clock
    failpoints: Failpoints
    inbox: Inbox
    outbox: Outbox
    owners: Owners
    incarnation: str
    store: EmbeddingLink = field(default_factory=EmbeddingLink)


@dataclass(slots=True)
class Encoding:
    """One Encode command. Its id is the handoff id, too. ``missing``: not encoded yet;
    ``unread``: encoded, and not yet confirmed by a reader."""

    request_id: str
    mm_hashes: tuple[str, ...]
    missing: set[str]
    unread: set[str]
    span: Span
    encoded: int = 0
    held: bool = field(default=False)


class EncoderCore:
    """Requests of one encoder. ``submit``, ``put_media``, ``status``, ``detached``, ``drain``: any
    thread."""

    def __init__(self, parts: EncoderParts) -> None:
        self._p = parts
        self._emit = parts.owners.emit
        self._media: OrderedDict[str, bytes] = OrderedDict()
        self._media_bytes = 0
        #: Looked up in the store, or being prepared; since when.
        self._preparing: dict[str, float] = {}
        self._encoding: dict[str, float] = {}
        self._unplaced: dict[str, Prepared] = {}
        self._live: dict[str, Encoding] = {}
        self._draining = False
        self.num_steps = 0

    # -- any thread ---------------------------------------------------------------------------

    def submit(self, router_id: str, commands: list[Command]) -> None:
        """Queue a router's commands, in order."""
        self._p.inbox.post(lambda: self._handle(router_id, commands))

    def subscribe(self, router_id: str, deliver: Callable[[list[Event]], None]) -> Callable[[], None]:
        """Receive every batch of events for that router until the returned function is called."""
        return self._p.outbox.subscribe(router_id, deliver)

    def put_media(self, mm_hash: str, data: bytes) -> None:
        """Keep raw media for a coming Encode; the oldest go when the bound is reached."""
        self._p.inbox.post(lambda: self._keep(mm_hash, data))

    def detached(self, router_id: str) -> None:
        """The router's stream ended: unless it comes back soon, nobody wants its pictures any more."""
        self._p.inbox.post(lambda: self._p.owners.orphaned(router_id))

    def drain(self) -> None:
        """Take no new work, and say so."""
        self._p.inbox.post(self._drain)

    def status(self) -> WorkerStatus:
        """Load and progress now."""
        pool = self._p.pool
        return WorkerStatus(
            incarnation=self._p.incarnation,
            num_running=sum(1 for e in self._live.values() if not e.held),
            num_waiting=self._p.scheduler.num_waiting,
            num_blocks=pool.num_blocks,
            num_blocks_free=pool.num_free,
            num_blocks_quarantined=pool.num_quarantined,
            num_blocks_held=self._num_blocks_held(),
            num_leases=len(self._p.leases),
            steps=self.num_steps,
            turns=self._p.inbox.turns,
            draining=self._draining,
        )

    def _num_blocks_held(self) -> int:
        hashes = {mm_hash for encoding in list(self._live.values()) for mm_hash in encoding.mm_hashes}
        entries = (self._p.cache.get(mm_hash) for mm_hash in hashes)
        return sum(len(entry.block_ids) for entry in entries if entry is not None)

    # -- engine thread ------------------------------------------------------------------------

    def abort_all(self) -> None:
        """Give back every request."""
        for request_id in list(self._live):
            self._release(request_id)

    def tick(self) -> None:
        """Leases that ended are given back: a normal outcome with a metric."""
        for request_id in self._p.owners.expired():
            self._release(request_id)
        for request_id in self._p.leases.expired():
            if request_id in self._live:
                metrics.LEASES_EXPIRED.labels("embedding").inc()
                self._release(request_id)
        self._place()

    def step(self) -> bool:
        """Run one batch, if there is one."""
        plan = self._p.scheduler.schedule()
        if plan is None:
            return False
        result = self._p.runner.execute(plan)
        self._p.failpoints.hit("encode.commit")
        self.num_steps += 1
        metrics.STEPS.inc()
        metrics.ENCODED_ITEMS.inc(len(plan.items))
        now = self._p.clock.now()
        for item, checksum in zip(plan.items, result.checksums, strict=True):
            self._p.cache.commit(item.mm_hash, checksum)
            self._p.store.encoded(item.mm_hash, now - self._encoding.pop(item.mm_hash))
            self._p.cache.release(item.mm_hash, _STEP)
            self._ready(item.mm_hash)
        return True

    def verified(self, payload: bytes) -> None:
        """A reader has one of a request's items; when all are read the request is over."""
        request_id, _, mm_hash = payload.decode("ascii", "replace").partition(" ")
        encoding = self._live.get(request_id)
        if encoding is None:
            return
        encoding.unread.discard(mm_hash)
        if not encoding.unread:
            self._release(request_id)

    # -- commands -----------------------------------------------------------------------------

    def _drain(self) -> None:
        self._draining = True
        self._p.outbox.broadcast(Status(self.status()))

    def _handle(self, router_id: str, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Encode):
                self._encode(router_id, command)
            elif isinstance(command, Abort):
                self._release(command.request_id)
            elif isinstance(command, Renew):
                self._p.owners.renew(command.request_ids)
                for handoff_id in command.handoff_ids:
                    self._p.leases.renew(handoff_id)
            elif isinstance(command, Drain):
                self._drain()

    def _encode(self, router_id: str, command: Encode) -> None:
        if self._draining or command.request_id in self._live:
            error = Overloaded("this encoder takes no new work")
            failed = Failed(command.request_id, error.code, error.message, error.retryable)
            self._p.outbox.emit(router_id, failed)
            return
        self._p.owners.begin(command.request_id, router_id)
        span = self._p.tracer.span("encode", parent=command.traceparent)
        hashes = tuple(dict.fromkeys(command.mm_hashes))
        encoding = Encoding(command.request_id, command.mm_hashes, set(hashes), set(hashes), span)
        self._live[command.request_id] = encoding
        for mm_hash in hashes:
            entry = self._p.cache.acquire(mm_hash, command.request_id)
            metrics.ENCODER_QUERIES.inc()
            if entry is not None and entry.state == READY:
                metrics.ENCODER_HITS.inc()
                encoding.missing.discard(mm_hash)
            elif entry is None and not self._prepare(mm_hash):
                gone = NotFound("the media is not here (any more)")
                self._fail(encoding, gone, retryable=True)  # the router puts it again
                return
        self._finish_if_ready(encoding)

    def _prepare(self, mm_hash: str) -> bool:
        if mm_hash in self._preparing or mm_hash in self._unplaced:
            return True
        data = self._media.get(mm_hash)
        if data is None:
            return False
        self._preparing[mm_hash] = self._p.clock.now()
        self._p.store.find(mm_hash, data, lambda found: self._looked_up(mm_hash, data, found))
        return True

    def _looked_up(self, mm_hash: str, data: bytes, found: bool) -> None:
        """The store had the embeddings, and they are here; or they have to be made."""
        if found:
            del self._preparing[mm_hash]
            for encoding in self._waiting_for(mm_hash):
                self._p.cache.acquire(mm_hash, encoding.request_id)
            self._ready(mm_hash)
            return
        self._preparing[mm_hash] = self._p.clock.now()
        self._p.preparer.prepare(data, lambda out: self._p.inbox.post(lambda: self._prepared(mm_hash, out)))

    def _prepared(self, mm_hash: str, outcome: Prepared | TriptychError) -> None:
        began = self._preparing.pop(mm_hash)
        if isinstance(outcome, TriptychError):
            for encoding in self._waiting_for(mm_hash):
                self._fail(encoding, outcome)
            return
        self._encoding[mm_hash] = began
        self._unplaced[mm_hash] = outcome
        self._place()

    def _waiting_for(self, mm_hash: str) -> list[Encoding]:
        return [e for e in self._live.values() if not e.held and mm_hash in e.missing]

    def _place(self) -> None:
        """Give prepared items room, in order. One that finds none waits for what is being read or encoded
        to come free; when there is nothing of the kind, no waiting would help."""
        while self._unplaced:
            mm_hash, prepared = next(iter(self._unplaced.items()))
            waiting = self._waiting_for(mm_hash)
            problem = self._schedule(mm_hash, prepared, waiting) if waiting else None
            in_use = self._p.scheduler.num_waiting or any(e.held for e in self._live.values())
            if problem and (in_use or self._p.store.holds_any):
                return
            del self._unplaced[mm_hash]
            if problem or not waiting:
                del self._encoding[mm_hash]
            for encoding in waiting if problem else ():
                self._fail(encoding, Overloaded("no room for embeddings"))

    def _schedule(self, mm_hash: str, prepared: Prepared, waiting: list[Encoding]) -> OutOfBlocks | None:
        try:
            entry = self._p.cache.allocate(mm_hash, prepared.num_rows, _STEP)
        except OutOfBlocks as error:
            return error
        for encoding in waiting:
            encoding.encoded += 1
            self._p.cache.acquire(mm_hash, encoding.request_id)
        self._p.scheduler.add(
            EncodeItem(mm_hash, prepared.data, prepared.shape, prepared.num_rows, tuple(entry.block_ids))
        )
        return None

    def _ready(self, mm_hash: str) -> None:
        for encoding in list(self._live.values()):
            if not encoding.held and mm_hash in encoding.missing:
                encoding.missing.discard(mm_hash)
                self._finish_if_ready(encoding)

    def _finish_if_ready(self, encoding: Encoding) -> None:
        if encoding.missing:
            return
        encoding.held = True
        encoding.span.set("items_encoded", encoding.encoded)
        encoding.span.end()
        self._p.leases.grant(encoding.request_id)
        metrics.LEASES_GRANTED.labels("embedding").inc()
        params = tuple(self._params(encoding.request_id, mm_hash) for mm_hash in encoding.mm_hashes)
        self._emit(HandoffReady(encoding.request_id, encoding.request_id, embeddings=params))

    def _params(self, request_id: str, mm_hash: str) -> EcTransferParams:
        entry = self._p.cache.get(mm_hash)
        if entry is None:
            raise KeyError(mm_hash)
        return EcTransferParams(
            handoff_id=request_id,
            producer=self._p.agent(),
            mm_hash=mm_hash,
            num_rows=entry.num_rows,
            row_bytes=self._p.row_bytes,
            dtype=self._p.dtype,
            block_ids=tuple(entry.block_ids),
            generations=tuple(self._p.pool.generation(block_id) for block_id in entry.block_ids),
            checksum=entry.checksum,
        )

    def _fail(self, encoding: Encoding, error: TriptychError, *, retryable: bool | None = None) -> None:
        encoding.span.end()
        again = error.retryable if retryable is None else retryable
        self._emit(Failed(encoding.request_id, error.code, error.message, again, error.param or ""))
        self._release(encoding.request_id)

    def _release(self, request_id: str) -> None:
        encoding = self._live.pop(request_id, None)
        if encoding is None:
            return
        self._p.leases.release(request_id)
        for mm_hash in encoding.mm_hashes:
            self._p.cache.release(mm_hash, request_id)
        if not encoding.held:
            encoding.span.end()
        self._emit(Released(request_id))

    def _keep(self, mm_hash: str, data: bytes) -> None:
        if mm_hash in self._media:
            self._media.move_to_end(mm_hash)
            return
        self._media[mm_hash] = data
        self._media_bytes += len(data)
        while self._media_bytes > self._p.max_held_media_bytes and len(self._media) > 1:
            _, old = self._media.popitem(last=False)
            self._media_bytes -= len(old)


#: The cache user that stands for a step in flight.
_STEP = "step"
