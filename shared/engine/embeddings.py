"""Brings a request's embeddings into the local ``ec`` arena, once, and keeps them while they are used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shared.engine.desk import PullDesk
from shared.engine.observe import observe_pull
from shared.errors import OutOfBlocks
from shared.kv_cache.encoder_cache import READY, EncoderCache
from shared.step import MediaRows
from shared.telemetry import metrics
from shared.telemetry.tracing import Span, Tracer
from shared.transfer.handoff import BlockPull, PackedCheck, Pull, PullOutcome
from shared.types.request import GenerationRequest
from shared.types.transfer import BlockRef, EcTransferParams


@dataclass(slots=True)
class Waiting:
    """A request that waits for embeddings; ``missing`` are hashes not ready yet."""

    request: GenerationRequest
    missing: set[str]
    span: Span
    ready: Callable[[tuple[MediaRows, ...]], None]
    failed: Callable[[str], None]
    nbytes: int = 0


class Embeddings:
    """Pulls by hash, shared between requests. Engine thread only."""

    def __init__(
        self, cache: EncoderCache, desk: PullDesk, tracer: Tracer, deadline_s: float, row_bytes: int
    ) -> None:
        self._cache = cache
        self._desk = desk
        self._tracer = tracer
        self._deadline_s = deadline_s
        self._row_bytes = row_bytes
        self._waiting: dict[str, Waiting] = {}
        self._quarantined: dict[str, tuple[int, ...]] = {}

    def fetch(
        self,
        request: GenerationRequest,
        params: tuple[EcTransferParams, ...],
        ready: Callable[[tuple[MediaRows, ...]], None],
        failed: Callable[[str], None],
    ) -> None:
        """Make every media item of the request readable here, then call ``ready`` with its rows.
        Each hash is pulled once, however many requests ask; held ones cost nothing."""
        by_hash = {p.mm_hash: p for p in params}
        span = self._tracer.span("embedding.transfer", parent=request.traceparent)
        waiting = Waiting(request, set(), span, ready, failed)
        self._waiting[request.request_id] = waiting
        for item in request.media:
            entry = self._cache.acquire(item.mm_hash, request.request_id)
            metrics.ENCODER_QUERIES.inc()
            if entry is not None and entry.state == READY:
                metrics.ENCODER_HITS.inc()
                continue
            waiting.missing.add(item.mm_hash)
            problem = "" if entry is not None else self._pull(request, by_hash.get(item.mm_hash))
            if problem:
                self._fail(waiting, problem)
                return
        self._finish_if_ready(waiting)

    def release(self, request: GenerationRequest) -> None:
        """The request needs its embeddings no more (or no longer waits for them). Idempotent."""
        waiting = self._waiting.pop(request.request_id, None)
        if waiting is not None:
            waiting.span.end()
        for item in request.media:
            self._cache.release(item.mm_hash, request.request_id)

    def _pull(self, request: GenerationRequest, params: EcTransferParams | None) -> str:
        if params is None:
            return "no embeddings were handed over"
        if params.row_bytes != self._row_bytes:
            return "embedding rows of another width"
        num_blocks = self._cache.num_blocks_for(params.num_rows)
        if not len(params.block_ids) == len(params.generations) == num_blocks > 0:
            return "embeddings in blocks of another size"
        try:
            entry = self._cache.allocate(params.mm_hash, params.num_rows, request.request_id)
        except OutOfBlocks:
            return "no room for embeddings"
        blocks = tuple(
            BlockPull(BlockRef(block_id, generation, ()), local)
            for block_id, generation, local in zip(
                params.block_ids, params.generations, entry.block_ids, strict=True
            )
        )
        check = PackedCheck(params.num_rows * params.row_bytes, params.checksum)
        pull = Pull(
            pull_id=self._desk.new_id(),
            producer=params.producer,
            region="ec",
            group=0,
            blocks=blocks,
            checksum_heads=0,
            deadline_s=self._deadline_s,
            packed=check,
        )
        self._desk.pull(
            pull,
            lambda outcome: self._on_outcome(params, outcome),
            lambda: self._settled(pull.pull_id),
        )
        return ""

    def _on_outcome(self, params: EcTransferParams, outcome: PullOutcome) -> None:
        observe_pull("embedding", outcome)
        waiters = [w for w in self._waiting.values() if params.mm_hash in w.missing]
        if all(outcome.ok):
            self._cache.commit(params.mm_hash, params.checksum)
            self._desk.notify(params.producer, f"{params.handoff_id} {params.mm_hash}".encode())
            for waiting in waiters:
                waiting.missing.discard(params.mm_hash)
                waiting.nbytes += outcome.nbytes
                self._finish_if_ready(waiting)
            return
        stale = self._cache.fail(params.mm_hash, quarantine=not outcome.terminal)
        if not outcome.terminal:
            self._quarantined[outcome.pull_id] = stale
        for waiting in waiters:
            self._fail(waiting, f"embeddings did not arrive ({outcome.reason})")

    def _settled(self, pull_id: str) -> None:
        self._cache.release_quarantined(self._quarantined.pop(pull_id, ()))

    def _finish_if_ready(self, waiting: Waiting) -> None:
        if waiting.missing or self._waiting.pop(waiting.request.request_id, None) is None:
            return
        waiting.span.set("embedding.bytes", waiting.nbytes)
        waiting.span.end()
        rows = []
        for item in waiting.request.media:
            entry = self._cache.get(item.mm_hash)
            if entry is None or entry.num_rows != item.num_tokens:
                waiting.failed("embedding rows do not match the placeholders")
                return
            rows.append(MediaRows(item, tuple(entry.block_ids)))
        waiting.ready(tuple(rows))

    def _fail(self, waiting: Waiting, problem: str) -> None:
        if self._waiting.pop(waiting.request.request_id, None) is not None:
            waiting.span.end()
            waiting.failed(problem)
