"""A runner whose next token is a plain sum over what its paged memory holds.

It reads tokens back through the block tables, so a wrong table, a missed copy or a recycled block
changes the answer. ``expected_tokens`` is the same sum without any paging.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.runner.base import DoneStep, PendingStep, Runner
from shared.step import LAST_SAMPLED, NewRow, RowStep, StepPlan, StepResult

VOCAB = 997


def next_token(tokens: list[int], choice: int) -> int:
    """The token after ``tokens`` for one choice; ids 1 .. VOCAB-1."""
    total = sum((position + 1) * token for position, token in enumerate(tokens))
    return 1 + (total * 31 + choice * 7 + len(tokens)) % (VOCAB - 1)


def expected_tokens(prompt: list[int], count: int, choice: int = 0) -> list[int]:
    """``count`` tokens after the prompt, without stops."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, choice))
    return tokens[len(prompt) :]


@dataclass
class _Row:
    new: NewRow
    table: list[int] = field(default_factory=list)
    last: int = 0


class SumRunner(Runner):
    """Executes plans at once, or one step late when ``overlap`` holds the result back."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._memory: dict[tuple[int, int], int] = {}
        self._rows: dict[int, _Row] = {}
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> PendingStep:
        self.plans.append(plan)
        for row in plan.free_rows:
            self._rows.pop(row)
        for new in plan.new_rows:
            assert new.row not in self._rows, "a row that is still in use was given away"
            self._rows[new.row] = _Row(new)
        for copy in plan.copies:
            for offset in range(self._block_size):
                if (copy.src, offset) in self._memory:
                    self._memory[copy.dst, offset] = self._memory[copy.src, offset]
        rows: list[int] = []
        tokens: list[int] = []
        for step in plan.rows:
            seen = self._compute(step)
            for row in step.sample_rows:
                self._rows[row].last = next_token(seen, self._rows[row].new.choice)
                rows.append(row)
                tokens.append(self._rows[row].last)
        checksums = tuple((seal.block_id,) for seal in plan.seals)
        return DoneStep(StepResult(plan.step_id, tuple(rows), tuple(tokens), (None,) * len(rows), checksums))

    def _compute(self, step: RowStep) -> list[int]:
        row = self._rows[step.row]
        if step.blocks[0]:
            row.table[step.block_start :] = step.blocks[0]
        for position, token in enumerate(step.token_ids, step.first):
            value = row.last if token == LAST_SAMPLED else token
            self._memory[self._slot(row, position)] = value
        end = step.first + len(step.token_ids)
        return [self._memory[self._slot(row, position)] for position in range(end)]

    def _slot(self, row: _Row, position: int) -> tuple[int, int]:
        return row.table[position // self._block_size], position % self._block_size

    def close(self) -> None:
        self._rows.clear()
