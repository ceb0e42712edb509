"""What every runner keeps of its rows on the host: histories, sampling, and where their media lie.

Owns the states by row index, from a NewRow to its free; no block tables, no KV memory and no policy.
Shapes: A = media tokens of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shared.runner.kv_tensors import packed_rows
from shared.sampling.row import SamplerRow, is_plain_greedy
from shared.step import NewRow, RowStep


@dataclass
class _Row:
    """One row's state. The end of ``history`` is what a LAST_SAMPLED input stands for."""

    new: NewRow
    history: list[int]
    media: tuple[tuple[int, torch.Tensor], ...]  # (first placeholder position, embedding rows)


class RowStates:
    """``rows_per_block`` is the embedding memory's."""

    def __init__(self, eos_token_ids: tuple[int, ...], rows_per_block: int) -> None:
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

    def last_token(self, row: int) -> int:
        """The end of the row's history."""
        return self._rows[row].history[-1]

    def num_prompt_tokens(self, row: int) -> int:
        """Tokens of the row's prompt."""
        return self._rows[row].new.num_prompt_tokens

    def media(
        self, steps: Sequence[RowStep], starts: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Tokens [A] of a step that are placeholders, and their rows [A] of the embedding memory; None where
        there are none. ``starts``: the token at which each row's run begins."""
        tokens: list[torch.Tensor] = []
        rows: list[torch.Tensor] = []
        for step, base in zip(steps, starts, strict=False):
            for offset, embedding_rows in self._rows[step.row].media:
                first = max(step.first, offset)
                last = min(step.first + len(step.token_ids), offset + len(embedding_rows))
                if first < last:
                    tokens.append(torch.arange(first, last) - step.first + base)
                    rows.append(embedding_rows[first - offset : last - offset])
        return (torch.cat(tokens), torch.cat(rows)) if tokens else None

    def sampler_rows(self, rows: Sequence[int]) -> list[SamplerRow]:
        """What sampling needs of these rows; valid until the next ``append``."""
        states = [self._rows[row] for row in rows]
        return [
            SamplerRow(s.new.sampling, s.new.choice, s.history, s.new.num_prompt_tokens, self._eos_token_ids)
            for s in states
        ]

    def are_plain(self, rows: Sequence[int]) -> bool:
        """Whether each of these rows simply wants its likeliest token."""
        return all(is_plain_greedy(self._rows[row].new.sampling) for row in rows)

    def append(self, row: int, token_id: int) -> None:
        """The row's next token is known: what penalties and the random position need. (The history of a plain
        row is not read where the runner keeps its last token elsewhere.)"""
        self._rows[row].history.append(token_id)
