"""The token scheduler: hands out a token budget until computed tokens meet wanted tokens.

Chunked prefill, prefix hits, local prefill on a decode worker, preemption by recompute and the
overlap of steps all fall out of that one rule. Owns the waiting and running sets and the rows;
does not own blocks (``KVCacheManager``) nor what happens after a token (the engine).
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from shared.errors import InvalidRequest, OutOfBlocks
from shared.kv_cache.manager import CommittedBlock, KVCacheManager
from shared.scheduler.plan_builder import PlanBuilder, ScheduledStep, Slot
from shared.scheduler.sequence import Sequence, finish_reason_for
from shared.step import RowStep, StepResult
from shared.telemetry import metrics
from shared.types.request import TokenLogprobs
from shared.types.worker import PREFILL

#: A sequence preempted this often is no longer chosen as a victim, so that it makes progress.
MAX_PREEMPTIONS = 3


@dataclass(frozen=True)
class SchedulerLimits:
    """``max_num_batched_tokens``: token budget of a step. ``max_num_seqs``: rows."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int


@dataclass(slots=True)
class Outcome:
    """What one step meant for one sequence. ``token_id`` is None when nothing was sampled.
    ``failed``: "numerical" (logits not finite) or "preempted" (its blocks were needed and it cannot
    be recomputed here); the sequence is closed then, or will be when its step comes home."""

    sequence: Sequence
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    stop_token_id: int | None = None
    num_computed: int = 0
    committed: tuple[CommittedBlock, ...] = ()
    failed: str = ""


class Scheduler:
    """One worker's scheduler. Not thread-safe: the engine thread owns it."""

    def __init__(self, limits: SchedulerLimits, kv: KVCacheManager, eos_token_ids: frozenset[int]) -> None:
        self._limits = limits
        self._kv = kv
        self._eos = eos_token_ids
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self._rows_to_free: list[int] = []
        self._lost: list[Outcome] = []
        self._no_blocks: tuple[tuple[int, ...], ...] = ((),) * len(kv.spec.groups)
        self._step_id = 0
        self.num_preemptions = 0

    # -- membership ---------------------------------------------------------------------------

    @property
    def max_rows(self) -> int:
        """Choices that one request may have while its prompt is computed."""
        return self._limits.max_num_seqs

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence (with its forks, if any). If ``kv_open``, its blocks and
        ``num_computed`` are kept. Raises InvalidRequest when it needs more rows than there are."""
        if 1 + len(sequence.children) > self._limits.max_num_seqs:
            raise InvalidRequest("more choices than this worker has rows", param="n")
        insort(self._waiting, sequence, key=_order)

    def stop(self, sequence: Sequence) -> bool:
        """Take a sequence out: no new step for it. Returns True when its blocks were given back now,
        False when a step is still in flight (``update`` gives them back). Idempotent."""
        sequence.closing = True
        _discard(self._waiting, sequence)
        if sequence.inflight:
            return False
        self._leave(sequence)
        self._close(sequence)
        return True

    # -- one step -----------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step, or None when there is nothing to compute. Counts advance now; results
        of steps in flight may be missing."""
        builder = PlanBuilder(self._step_id + 1, self._limits.max_num_batched_tokens)
        self._fill(builder)
        while builder.made_room and not builder.rows:
            builder.made_room = builder.short_of_blocks = False
            self._fill(builder)
        if not builder.rows and not builder.new_rows:
            return None
        self._step_id += 1
        builder.free_rows = tuple(self._rows_to_free)
        self._rows_to_free.clear()
        return builder.build()

    def _fill(self, builder: PlanBuilder) -> None:
        # Decodes first: a long prompt must not hold up the streams beside it.
        for sequence in sorted(self._running, key=_wants_many):
            if builder.budget <= 0:
                break
            # A choice that has not forked yet has no blocks: its prompt is the parent's work.
            if builder.involves(sequence) or not sequence.kv_open or sequence.row < 0:
                continue
            if sequence.wants_step(self._limits.max_model_len):
                self._continue(sequence, builder)
        if not builder.short_of_blocks:
            self._admit(builder)

    def update(self, step: ScheduledStep, result: StepResult) -> list[Outcome]:
        """Take in a finished step. Sequences that finished or were stopped give their blocks back
        once no step of theirs is in flight, except PREFILL ones that finished by sampling: their
        blocks stay open under ``key`` for the handoff."""
        checksums = {
            (seal.group, seal.block_id): values
            for seal, values in zip(step.plan.seals, result.checksums, strict=True)
        }
        sampled = dict(zip(result.rows, zip(result.token_ids, result.logprobs, strict=True), strict=True))
        failed = frozenset(result.failed_rows)
        for copy in step.plan.copies:
            self._kv.unpin(copy.group, (copy.src,))
        outcomes: list[Outcome] = []
        for slot in step.slots:
            row = slot.sequence.row
            committed = self._commit(slot, checksums, row in failed)
            for sequence in slot.samplers or (slot.sequence,):
                outcome = self._settle(sequence, sampled, failed, bool(slot.samplers))
                if sequence is slot.sequence:
                    outcome = outcome or (Outcome(sequence) if committed else None)
                    if outcome:
                        outcome.committed = committed
                        outcome.num_computed = slot.num_computed
                if outcome:
                    outcomes.append(outcome)
        return outcomes

    # -- planning -----------------------------------------------------------------------------

    def _continue(self, sequence: Sequence, builder: PlanBuilder) -> None:
        block_size = self._kv.spec.block_size
        count = min(builder.budget, sequence.num_tokens - sequence.num_computed)
        first, end = sequence.num_computed, sequence.num_computed + count
        try:
            copies = self._kv.reserve(sequence.key, end, writable_from=first)
        except OutOfBlocks:
            builder.short_of_blocks = True
            self._make_room(builder)
            return
        for copy in copies:
            # Until the copy was made its source must not be handed out, whoever else lets go of it.
            self._kv.pin(copy.group, (copy.src,))
        builder.copies.extend(copies)
        # What may have been replaced: the block of a copy, and blocks that are written from their start.
        changed = first // block_size if copies else -(-first // block_size)
        start = min(sequence.sent_blocks, changed)
        length = self._kv.table_len(sequence.key)
        blocks = self._no_blocks
        if start < length:
            blocks = self._kv.table(sequence.key, start)
            sequence.sent_blocks = length
        samplers = self._samplers(sequence, end)
        slot = Slot(sequence, end, samplers, self._seals(sequence, end, bool(samplers)))
        inputs = sequence.inputs(count)
        sequence.num_computed = end
        for sampler in samplers:
            sampler.num_pending += 1
            if sampler is not sequence:
                self._fork(sequence, sampler)
        for member in samplers or (sequence,):
            member.inflight += 1
        if samplers:
            sequence.children = ()
        builder.add_step(
            RowStep(sequence.row, first, inputs, start, blocks, tuple(s.row for s in samplers)), slot
        )

    def _samplers(self, sequence: Sequence, end: int) -> tuple[Sequence, ...]:
        if end < sequence.num_tokens:
            return ()
        return (sequence, *(child for child in sequence.children if not child.closing))

    def _seals(self, sequence: Sequence, end: int, samples: bool) -> tuple[tuple[int, int], ...]:
        tail = samples and sequence.mode == PREFILL
        if not tail and end // self._kv.spec.block_size == sequence.num_computed // self._kv.spec.block_size:
            return ()
        found = self._kv.sealable(sequence.key, end, tail=tail)
        return tuple((group, block_id) for group, _, block_id in found)

    def _fork(self, parent: Sequence, child: Sequence) -> None:
        child.num_computed = parent.num_computed
        child.num_cached = parent.num_cached
        if parent.mode != PREFILL:
            self._kv.fork(parent.key, child.key)
            child.kv_open = True

    # -- admission ----------------------------------------------------------------------------

    def _admit(self, builder: PlanBuilder) -> None:
        while self._waiting and builder.budget > 0:
            sequence = self._waiting[0]
            members = (sequence, *(child for child in sequence.children if not child.closing))
            if len(members) > len(self._free_rows):
                return
            if not self._open(sequence):
                # What runs will give blocks back; those that only wait never would.
                if self._running or not self._take_back():
                    return
                continue
            self._waiting.pop(0)
            for member in members:
                member.row = self._free_rows.pop()
                insort(self._running, member, key=_order)
                builder.add_row(member)
            if not sequence.wants_step(self._limits.max_model_len):
                continue
            self._continue(sequence, builder)

    def _open(self, sequence: Sequence) -> bool:
        """Give the sequence its cached blocks; False when its tokens would not fit beside the others.
        One that comes with blocks (received or loaded) may need one more, to copy a shared tail."""
        came_open = sequence.kv_open
        if not came_open:
            request = sequence.request
            sequence.num_cached = sequence.num_computed = self._kv.open(
                sequence.key,
                sequence.tokens,
                request.media,
                request.cache_salt,
                request.adapter,
                max_cached_tokens=len(sequence.tokens) - 1,
            )
            sequence.kv_open = True
        missing = self._kv.spec.num_blocks_for(sequence.num_tokens) - self._kv.table_len(sequence.key)
        if missing + came_open <= self._min_free():
            return True
        if not came_open:
            self._close(sequence)
            sequence.num_cached = sequence.num_computed = 0
        return False

    def _min_free(self) -> int:
        return min(self._kv.num_free(group) for group in range(len(self._kv.spec.groups)))

    # -- preemption ---------------------------------------------------------------------------

    def take_lost(self) -> list[Outcome]:
        """Sequences that lost their blocks since the last call and cannot be recomputed here."""
        lost, self._lost = self._lost, []
        return lost

    def _take_back(self) -> bool:
        """Preempt the last that waits with blocks (received or loaded), the first in order excepted."""
        holders = [sequence for sequence in self._waiting[1:] if sequence.kv_open]
        if holders:
            self._preempt(holders[-1])
        return bool(holders)

    def _make_room(self, builder: PlanBuilder) -> None:
        """Preempt the last in order; the one in need tries again next step. A victim with a step in
        flight gives its blocks back when that step has come home."""
        if any(s.preempt_pending for s in self._running):
            return
        candidates = [s for s in (*self._running, *self._waiting) if not s.done and s.kv_open]
        victim = max(candidates, key=lambda s: (s.preemptions < MAX_PREEMPTIONS, s.order))
        if victim.inflight or builder.involves(victim):
            victim.preempt_pending = True
        else:
            self._preempt(victim)
            builder.made_room = True

    def _preempt(self, victim: Sequence) -> None:
        self.num_preemptions += 1
        metrics.PREEMPTIONS.inc()
        victim.preemptions += 1
        self._close(victim)
        _discard(self._waiting, victim)
        for member in (victim, *victim.children):
            self._leave(member)
            member.restart()
        if victim.recomputable:
            insort(self._waiting, victim, key=_order)
        else:
            victim.closing = True
            self._lost.append(Outcome(victim, failed="preempted"))

    # -- results ------------------------------------------------------------------------------

    def _commit(
        self, slot: Slot, checksums: dict[tuple[int, int], tuple[int, ...]], failed: bool
    ) -> tuple[CommittedBlock, ...]:
        sequence = slot.sequence
        if not slot.seals or failed or not sequence.kv_open:
            return ()
        mine = {block: checksums[block] for block in slot.seals}
        return tuple(self._kv.commit(sequence.key, slot.num_computed, mine))

    def _settle(
        self,
        sequence: Sequence,
        sampled: dict[int, tuple[int, TokenLogprobs | None]],
        failed: frozenset[int],
        samples: bool,
    ) -> Outcome | None:
        sequence.inflight -= 1
        if samples:
            sequence.num_pending -= 1
        outcome = None
        if not sequence.done:
            if sequence.row in failed:
                outcome = self._fail(sequence)
            elif samples:
                outcome = self._append(sequence, *sampled[sequence.row])
        if sequence.inflight == 0:
            self._come_home(sequence)
        return outcome

    def _append(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> Outcome:
        sequence.tokens.append(token_id)
        sequence.num_sampled += 1
        if sequence.kv_open:
            self._kv.append(sequence.key, (token_id,))
        reason, stop_id = finish_reason_for(sequence, token_id, self._eos, self._limits.max_model_len)
        sequence.finish_reason = reason
        return Outcome(sequence, token_id, logprobs, stop_id)

    def _fail(self, sequence: Sequence) -> Outcome:
        sequence.closing = True
        if sequence.kv_open:
            self._kv.invalidate(sequence.key)
        return Outcome(sequence, failed="numerical")

    def _come_home(self, sequence: Sequence) -> None:
        """No step of the sequence is in flight any more."""
        if sequence.mode == PREFILL and sequence.num_sampled and not sequence.closing:
            self._leave(sequence)
        elif sequence.done:
            self._leave(sequence)
            self._close(sequence)
        elif sequence.preempt_pending:
            self._preempt(sequence)

    def _close(self, sequence: Sequence) -> None:
        if sequence.kv_open:
            self._kv.close(sequence.key)
            sequence.kv_open = False

    def _leave(self, sequence: Sequence) -> None:
        """Out of the running set; the row is free for the next plan."""
        _discard(self._running, sequence)
        if sequence.row >= 0:
            self._rows_to_free.append(sequence.row)
            self._free_rows.append(sequence.row)
            sequence.row = -1


def _wants_many(sequence: Sequence) -> bool:
    return sequence.num_tokens - sequence.num_computed > 1


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


def _discard(members: list[Sequence], sequence: Sequence) -> None:
    if sequence in members:
        members.remove(sequence)
