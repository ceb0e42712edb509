"""Collects one step: the frozen plan for the runner and the scheduler's own record of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.scheduler.sequence import Sequence
from shared.step import BlockCopy, BlockSeal, NewRow, RowStep, StepPlan


@dataclass(slots=True)
class Slot:
    """What one sequence does in one step. ``num_computed`` is its count after the step;
    ``samplers`` are the sequences whose next token is sampled here (itself and forks)."""

    sequence: Sequence
    num_computed: int
    samplers: tuple[Sequence, ...]
    seals: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class ScheduledStep:
    """A plan together with the sequences behind its rows."""

    plan: StepPlan
    slots: list[Slot]


@dataclass(slots=True)
class PlanBuilder:
    """Mutable while one step is being scheduled; ``budget`` is the tokens still to give out.
    ``short_of_blocks``: a running sequence could not grow, so nobody new may be let in;
    ``made_room``: somebody was preempted for it."""

    step_id: int
    budget: int
    short_of_blocks: bool = False
    made_room: bool = False
    free_rows: tuple[int, ...] = ()
    new_rows: list[NewRow] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    rows: list[RowStep] = field(default_factory=list)
    seals: list[BlockSeal] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    members: set[str] = field(default_factory=set)

    def involves(self, sequence: Sequence) -> bool:
        """Whether the sequence is computed or sampled in this step already (a fork just made is)."""
        return sequence.key in self.members

    def add_row(self, sequence: Sequence) -> None:
        """Tell the runner of a row it does not know yet."""
        self.new_rows.append(
            NewRow(
                row=sequence.row,
                request_id=sequence.request.request_id,
                choice=sequence.choice,
                token_ids=tuple(sequence.tokens),
                num_prompt_tokens=sequence.request.num_prompt_tokens,
                sampling=sequence.request.sampling,
                media=sequence.media,
            )
        )

    def add_step(self, step: RowStep, slot: Slot) -> None:
        """Add one row's work and take its tokens off the budget."""
        self.rows.append(step)
        self.slots.append(slot)
        self.members.add(slot.sequence.key)
        self.members.update(sampler.key for sampler in slot.samplers)
        self.seals.extend(BlockSeal(group, block_id) for group, block_id in slot.seals)
        self.budget -= len(step.token_ids)

    def build(self) -> ScheduledStep:
        """The finished step."""
        plan = StepPlan(
            step_id=self.step_id,
            free_rows=self.free_rows,
            new_rows=tuple(self.new_rows),
            copies=tuple(self.copies),
            rows=tuple(self.rows),
            seals=tuple(self.seals),
        )
        return ScheduledStep(plan, self.slots)
