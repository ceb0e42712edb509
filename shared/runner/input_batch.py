"""The rows of a model runner: what each row needs for its next step, kept where steps gather it.

Owns token histories, block tables and media placement of all rows. Owns no KV memory and no
policy. A row keeps its index from its NewRow to its free; nothing moves in between.
Shapes: T = tokens of a step, R = rows, M = blocks of a table, A = media tokens of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from shared.runner.kv_tensors import packed_rows
from shared.sampling.row import SamplerRow
from shared.step import LAST_SAMPLED, NewRow, RowStep


@dataclass
class _Row:
    """One row's state. The end of ``history`` is what a LAST_SAMPLED input stands for."""

    new: NewRow
    history: list[int]
    media: tuple[tuple[int, torch.Tensor], ...]  # (first placeholder position, embedding rows)


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


class InputBatch:
    """Rows 0 .. ``max_rows`` - 1 with tables of ``max_blocks`` blocks a group."""

    def __init__(
        self,
        num_groups: int,
        max_rows: int,
        max_blocks: int,
        eos_token_ids: tuple[int, ...],
        rows_per_block: int,
    ) -> None:
        self.tables_RM = [torch.zeros(max_rows, max_blocks, dtype=torch.int32) for _ in range(num_groups)]
        self._tables_np = [table.numpy() for table in self.tables_RM]
        self._rows: dict[int, _Row] = {}
        self._eos_token_ids = eos_token_ids
        self._rows_per_block = rows_per_block

    def add(self, new: NewRow) -> None:
        """Take a row in; it replaces whatever the index held."""
        media = tuple(
            (m.item.offset, packed_rows(m.block_ids, m.item.num_tokens, self._rows_per_block))
            for m in new.media
        )
        self._rows[new.row] = _Row(new, list(new.token_ids), media)

    def free(self, row: int) -> None:
        """Forget a row; an unknown index is ignored."""
        self._rows.pop(row, None)

    def prepare(self, steps: Sequence[RowStep]) -> StepInputs:
        """Update the block tables and gather the inputs of a step; ``steps`` is not empty."""
        token_ids: list[int] = []
        media_tokens: list[torch.Tensor] = []
        media_rows: list[torch.Tensor] = []
        sample_rows: list[int] = []
        sampled_from: list[int] = []
        for step in steps:
            row = self._rows[step.row]
            for table, blocks in zip(self._tables_np, step.blocks, strict=False):
                table[step.row, step.block_start : step.block_start + len(blocks)] = blocks
            base = len(token_ids)
            token_ids += [row.history[-1] if t == LAST_SAMPLED else t for t in step.token_ids]
            for offset, rows in row.media:
                first = max(step.first, offset)
                last = min(step.first + len(step.token_ids), offset + len(rows))
                if first < last:
                    media_tokens.append(torch.arange(first, last) - step.first + base)
                    media_rows.append(rows[first - offset : last - offset])
            sample_rows += step.sample_rows
            sampled_from += [len(token_ids) - 1] * len(step.sample_rows)
        counts = [len(step.token_ids) for step in steps]
        positions = np.concatenate(
            [np.arange(s.first, s.first + n) for s, n in zip(steps, counts, strict=True)]
        )
        rows_np = np.repeat([step.row for step in steps], counts)
        nothing = torch.empty(0, dtype=torch.int64)
        return StepInputs(
            token_ids_T=torch.tensor(token_ids, dtype=torch.int64),
            rows_T=torch.from_numpy(rows_np.astype(np.int32)),
            positions_T=torch.from_numpy(positions.astype(np.int32)),
            starts=(0, *accumulate(counts)),
            media_tokens_A=torch.cat(media_tokens) if media_tokens else nothing,
            media_rows_A=torch.cat(media_rows) if media_rows else nothing,
            sample_rows=tuple(sample_rows),
            sampled_from=tuple(sampled_from),
        )

    def sampler_rows(self, rows: Sequence[int]) -> list[SamplerRow]:
        """What sampling needs of these rows; valid until the next ``append``."""
        states = [self._rows[row] for row in rows]
        return [
            SamplerRow(s.new.sampling, s.new.choice, s.history, s.new.num_prompt_tokens, self._eos_token_ids)
            for s in states
        ]

    def append(self, row: int, token_id: int) -> None:
        """The row's next token was sampled."""
        self._rows[row].history.append(token_id)
