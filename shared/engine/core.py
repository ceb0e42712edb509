"""The engine of a prefill or decode worker: the only class a servicer touches.

Takes commands, owns the requests between Start and Released, and turns outcomes of steps into
events. Everything here happens in the engine thread (``loop``); ``submit``, ``status``,
``subscribe``, ``detached`` and ``drain`` may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shared.clock import Entropy
from shared.engine.desk import PullDesk
from shared.engine.embeddings import Embeddings
from shared.engine.inbox import Inbox, Outbox
from shared.engine.intake import Intake
from shared.engine.live import LiveRequest, sequences_of
from shared.engine.observe import observe_prompt
from shared.engine.outflow import Outflow
from shared.engine.owners import Owners
from shared.engine.spans import RequestSpans
from shared.engine.store_link import StoreLink
from shared.failpoints import Failpoints
from shared.kv_cache.manager import CommittedBlock, KVCacheManager
from shared.scheduler.scheduler import Outcome, Scheduler
from shared.scheduler.sequence import Sequence
from shared.step import MediaRows
from shared.telemetry import metrics
from shared.types.request import GenerationRequest
from shared.types.worker import (
    DECODE,
    PREFILL,
    Abort,
    Attach,
    Command,
    Drain,
    Event,
    Failed,
    Released,
    Renew,
    Resume,
    Start,
    Status,
    Tokens,
    WorkerStatus,
)


@dataclass(frozen=True)
class EngineParts:
    """What the composition root puts together. ``max_model_len`` in tokens. ``spoil`` flips a byte of the
    block (group, id) in memory; only a failpoint calls it."""

    model: str
    max_model_len: int
    scheduler: Scheduler
    kv: KVCacheManager
    desk: PullDesk
    outflow: Outflow
    embeddings: Embeddings
    store: StoreLink
    spans: RequestSpans
    entropy: Entropy
    failpoints: Failpoints
    spoil: Callable[[int, int], None]
    inbox: Inbox
    outbox: Outbox
    owners: Owners
    incarnation: str


class EngineCore:
    """Requests of one worker."""

    def __init__(self, parts: EngineParts, make_intake: Callable[[EngineCore], Intake]) -> None:
        self._p = parts
        self._emit = parts.owners.emit
        self._intake = make_intake(self)
        self._live: dict[str, LiveRequest] = {}
        self._ending: dict[str, LiveRequest] = {}
        self._arrivals = 0
        self._draining = False
        self.num_steps = 0
        parts.desk.on_notified = self._on_verified

    # -- any thread ---------------------------------------------------------------------------

    def submit(self, router_id: str, commands: list[Command]) -> None:
        """Queue a router's commands, in order."""
        self._p.inbox.post(lambda: self._handle(router_id, commands))

    def subscribe(self, router_id: str, deliver: Callable[[list[Event]], None]) -> Callable[[], None]:
        """Receive every batch of events for that router until the returned function is called."""
        return self._p.outbox.subscribe(router_id, deliver)

    def detached(self, router_id: str) -> None:
        """The router's stream ended: unless it comes back soon, nobody wants its answers any more."""
        self._p.inbox.post(lambda: self._p.owners.orphaned(router_id))

    def drain(self) -> None:
        """Take no new work, and say so."""
        self._p.inbox.post(self._drain)

    def status(self) -> WorkerStatus:
        """Load and progress now. A snapshot; counts may be one step old."""
        p = self._p
        kv = p.kv
        return WorkerStatus(
            incarnation=p.incarnation,
            num_running=p.scheduler.num_running,
            num_waiting=p.scheduler.num_waiting + self._intake.num_receiving,
            num_blocks=kv.num_blocks(),
            num_blocks_free=kv.num_free(),
            num_blocks_quarantined=kv.num_quarantined(),
            num_blocks_held=kv.num_used(),
            num_leases=p.outflow.num_held,
            num_cached_tokens=kv.num_cached_tokens,
            steps=self.num_steps,
            turns=p.inbox.turns,
            draining=self._draining,
        )

    # -- engine thread ------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing is live here: at rest, every block must be free."""
        return not self._live and not self._intake.num_receiving

    def abort_all(self) -> None:
        """Stop every request."""
        for request_id in [*self._live, *self._intake.request_ids()]:
            self._abort(Abort(request_id))

    def tick(self) -> None:
        """Housekeeping between steps: leases, waiting reservations, lost sequences."""
        for request_id in self._p.owners.expired():
            self._abort(Abort(request_id))
        for live in self._p.outflow.expire():
            self._forget(live)
        self._intake.retry()
        self.on_outcomes(self._p.scheduler.take_lost())

    def on_outcomes(self, outcomes: list[Outcome]) -> None:
        """Turn one step's outcomes into events."""
        touched: dict[str, LiveRequest] = {}
        for outcome in outcomes:
            live = self._live.get(outcome.sequence.request.request_id)
            if live is None:
                continue
            touched[live.request_id] = live
            if outcome.failed:
                self._fail_live(live, outcome.failed)
                continue
            if outcome.committed:
                self._after_checksum(outcome.committed[-1])
                if outcome.sequence.kv_open:
                    self._p.store.offer(outcome.committed)
            # Aborted or preempted with this step in flight: its blocks are given back already.
            if live.mode == PREFILL and outcome.sequence is live.parent and live.parent.kv_open:
                self._announce(live, outcome)
            if outcome.token_id is not None:
                self._emit_token(outcome)
        for live in {**self._ending, **touched}.values():
            self._advance(live)

    # -- commands -----------------------------------------------------------------------------

    def _drain(self) -> None:
        self._draining = True
        self._p.outbox.broadcast(Status(self.status()))

    def _handle(self, router_id: str, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Start):
                self._start(router_id, command)
            elif isinstance(command, Attach):
                self._intake.attach(command)
            elif isinstance(command, Resume):
                self._intake.resume(command)
            elif isinstance(command, Abort):
                self._abort(command)
            elif isinstance(command, Renew):
                self._p.owners.renew(command.request_ids)
                for handoff_id in command.handoff_ids:
                    self._p.outflow.renew(handoff_id)
            elif isinstance(command, Drain):
                self._drain()

    def _start(self, router_id: str, command: Start) -> None:
        request = command.request
        problem = self._refusal(request)
        if problem:
            code, message, retryable = problem
            # Not by way of the request's owner: it may be another's, of the same id.
            self._p.outbox.emit(router_id, Failed(request.request_id, code, message, retryable))
            return
        self._p.owners.begin(request.request_id, router_id, request.deadline_s)
        if command.mode == DECODE:
            self._intake.start(request)
            return
        self._arrivals += 1
        sequences = sequences_of(request, command.mode, self._arrivals)
        live = LiveRequest(request, command.mode, self._p.entropy.hex_id(), sequences)
        self._live[request.request_id] = live
        self._p.spans.begin(request, "prefill" if command.mode == PREFILL else "aggregated")
        if request.media:
            self._p.embeddings.fetch(
                request,
                command.embeddings,
                lambda rows: self._with_media(live, rows),
                lambda why: self._lose(request, why),
            )
        else:
            self._load(live)

    def _refusal(self, request: GenerationRequest) -> tuple[str, str, bool] | None:
        p = self._p
        if self._draining:
            return "overloaded", "this worker is draining", True
        if request.request_id in self._live or self._intake.receives(request.request_id):
            return "invalid_value", "duplicate request id", False
        if len(request.choices) > p.scheduler.max_rows:
            return "invalid_value", "more choices than this worker has rows", False
        if request.model != p.model:
            return "model_not_found", "this worker serves another model", False
        wanted = min(len(request.token_ids) + 1, p.max_model_len)
        if len(request.token_ids) >= p.max_model_len:
            return "context_length_exceeded", "the prompt fills the whole context", False
        smallest = min(p.kv.num_blocks(group) for group in range(len(p.kv.spec.groups)))
        if p.kv.spec.num_blocks_for(wanted) + 1 > smallest:
            return "context_length_exceeded", "the prompt cannot fit this worker's KV cache", False
        return None

    def _with_media(self, live: LiveRequest, rows: tuple[MediaRows, ...]) -> None:
        if self._live.get(live.request_id) is not live:
            return
        for sequence in live.sequences.values():
            sequence.media = rows
        self._load(live)

    def _load(self, live: LiveRequest) -> None:
        self._p.store.load(live.parent, lambda: self._enqueue(live))

    def _enqueue(self, live: LiveRequest) -> None:
        if self._live.get(live.request_id) is live:
            self._p.scheduler.add(live.parent)

    def arrived(self, request: GenerationRequest, sequences: dict[int, Sequence]) -> None:
        """A handoff is whole: schedule its sequences (the intake calls this)."""
        if not sequences:
            self._emit(Released(request.request_id))
            return
        live = LiveRequest(request, DECODE, "", sequences)
        self._live[request.request_id] = live
        self._p.spans.begin(request, "decode")
        for sequence in sequences.values():
            self._p.scheduler.add(sequence)

    def _abort(self, command: Abort) -> None:
        if self._intake.abort(command.request_id, command.choices):
            return
        live = self._live.get(command.request_id)
        if live is not None:
            live.unwanted.update(command.choices or live.sequences)
            self._advance(live)

    def _stop(self, live: LiveRequest, choices: tuple[int, ...]) -> None:
        self._p.store.forget(live.parent)
        for choice in choices:
            if choice in live.sequences:
                self._p.scheduler.stop(live.sequences[choice])

    # -- outcomes -----------------------------------------------------------------------------

    def _after_checksum(self, block: CommittedBlock) -> None:
        """Where a byte may change behind the checksum's back, when a test says so."""
        self._p.failpoints.hit("commit.after_checksum")
        if self._p.failpoints.armed("commit.after_checksum", "flip"):
            self._p.spoil(block.group, block.block_id)

    def _announce(self, live: LiveRequest, outcome: Outcome) -> None:
        spec = self._p.kv.spec
        num_blocks = outcome.num_computed // spec.block_size
        if outcome.token_id is not None:
            num_blocks = spec.num_blocks_for(outcome.num_computed)
        self._p.outflow.announce(live, num_blocks)

    def _emit_token(self, outcome: Outcome) -> None:
        sequence = outcome.sequence
        token_id = outcome.token_id
        if token_id is None:
            return
        first = sequence.num_sampled == 1
        if first and sequence.mode != DECODE:
            observe_prompt(sequence)
        self._emit(
            Tokens(
                sequence.request.request_id,
                sequence.choice,
                sequence.num_emitted - 1,
                (token_id,),
                (outcome.logprobs,) if outcome.logprobs else (),
                sequence.finish_reason,
                outcome.stop_token_id,
                sequence.num_cached if first else 0,
            )
        )
        self._p.failpoints.hit("decode.after_emit")

    def _advance(self, live: LiveRequest) -> None:
        """Move a request on after its sequences changed."""
        if live.held:
            if live.all_unwanted:
                self._on_verified(live.handoff_id.encode())
            return
        # While choices share the work on their prompt, and its handoff, they end all together.
        if live.all_unwanted or (live.unwanted and live.mode != PREFILL and not live.parent.children):
            self._stop(live, tuple(live.unwanted))
        if live.mode == PREFILL and live.parent.num_sampled and not live.parent.closing:
            self._p.embeddings.release(live.request)
            self._p.spans.end(live.request_id, cached_tokens=live.parent.num_cached)
            self._p.outflow.ready(live)
            if live.all_done:
                self._on_verified(live.handoff_id.encode())
        elif live.gone and self._live.get(live.request_id) is live:
            self._forget(live)
            self._emit(Released(live.request_id))
        elif live.all_done:
            # A step of it is still in flight; looked at again when that step has come home.
            self._ending[live.request_id] = live

    def _on_verified(self, payload: bytes) -> None:
        live = self._p.outflow.verified(payload.decode("ascii", "replace"))
        if live is not None:
            self._forget(live)

    def _fail_live(self, live: LiveRequest, why: str) -> None:
        code = "numerical_error" if why == "numerical" else "overloaded"
        if why == "numerical":
            metrics.NUMERICAL_FAILURES.inc()
        self._stop(live, tuple(live.sequences))
        self._emit(Failed(live.request_id, code, f"the request could not go on here ({why})", True))

    def _lose(self, request: GenerationRequest, why: str) -> None:
        live = self._live.pop(request.request_id, None)
        if live is not None:
            self._p.embeddings.release(request)
            self._p.spans.end(request.request_id)
        self._emit(Failed(request.request_id, "transfer_failed", why, True))

    def lost(self, request: GenerationRequest, why: str) -> None:
        """A handoff could not be received (the intake calls this)."""
        self._lose(request, why)

    def _forget(self, live: LiveRequest) -> None:
        self._live.pop(live.request_id, None)
        self._ending.pop(live.request_id, None)
        self._p.embeddings.release(live.request)
        self._p.spans.end(live.request_id, emitted=sum(s.num_sampled for s in live.sequences.values()))
