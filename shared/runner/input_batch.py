"""The rows of a model runner: what each row needs for its next step, kept where steps gather it.

Owns the block tables of all rows; their histories and media are ``RowStates``'. Owns no KV memory and no
policy. A row keeps its index from its NewRow to its free; nothing moves in between.
Shapes: T = tokens of a step, R = rows, M = blocks of a table, A = media tokens of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from shared.runner.row_states import RowStates
from shared.step import LAST_SAMPLED, RowStep


@dataclass(frozen=True)
class StepInputs:
    """One step's inputs. ``sampled_from`` is the token whose logits each of ``sample_rows`` uses."""

    token_ids_T: torch.Tensor
    rows_T: torch.Tensor
    positions_T: torch.Tensor
    starts: tuple[int, ...]
    media_tokens_A: torch.Tensor
    media_rows_A: torch.Tensor
    sample_rows: tuple[int, ...]
    sampled_from: tuple[int, ...]


class InputBatch(RowStates):
    """Rows 0 .. ``max_rows`` - 1 with tables of ``max_blocks`` blocks a group."""

    def __init__(
        self,
        num_groups: int,
        max_rows: int,
        max_blocks: int,
        eos_token_ids: tuple[int, ...],
        rows_per_block: int,
    ) -> None:
        super().__init__(eos_token_ids, rows_per_block)
        self.tables_RM = [torch.zeros(max_rows, max_blocks, dtype=torch.int32) for _ in range(num_groups)]
        self._tables_np = [table.numpy() for table in self.tables_RM]

    def prepare(self, steps: Sequence[RowStep]) -> StepInputs:
        """Update the block tables and gather the inputs of a step; ``steps`` is not empty."""
        token_ids: list[int] = []
        sample_rows: list[int] = []
        sampled_from: list[int] = []
        for step in steps:
            for table, blocks in zip(self._tables_np, step.blocks, strict=False):
                table[step.row, step.block_start : step.block_start + len(blocks)] = blocks
            token_ids += [self.last_token(step.row) if t == LAST_SAMPLED else t for t in step.token_ids]
            sample_rows += step.sample_rows
            sampled_from += [len(token_ids) - 1] * len(step.sample_rows)
        counts = [len(step.token_ids) for step in steps]
        positions = np.concatenate(
            [np.arange(s.first, s.first + n) for s, n in zip(steps, counts, strict=True)]
        )
        rows_np = np.repeat([step.row for step in steps], counts)
        starts = (0, *accumulate(counts))
        nothing = torch.empty(0, dtype=torch.int64)
        media_tokens_A, media_rows_A = self.media(steps, starts) or (nothing, nothing)
        return StepInputs(
            token_ids_T=torch.tensor(token_ids, dtype=torch.int64),
            rows_T=torch.from_numpy(rows_np.astype(np.int32)),
            positions_T=torch.from_numpy(positions.astype(np.int32)),
            starts=starts,
            media_tokens_A=media_tokens_A,
            media_rows_A=media_rows_A,
            sample_rows=tuple(sample_rows),
            sampled_from=tuple(sampled_from),
        )
