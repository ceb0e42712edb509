"""The rows of a GPU runner: block tables and last tokens on the device, histories on the host.

Owns how a plan's rows become the tensors of a step: packed on the host, copied in one piece, and taken apart
there. A row keeps its index from its NewRow to its free. Owns no KV memory and no policy.

Shapes: T = tokens, N = tiles of queries, S = sampled rows, R = rows, G = KV groups, M = blocks of a table,
A = media tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from shared.runner.gpu.device import Device
from shared.runner.row_states import RowStates
from shared.step import RowStep

#: Row and position of what fills a step up.
PADDING = -1
#: From the tokens at which rows begin, and their positions there: first tokens and counts of the tiles of
#: queries, and the rows (first and last token) that go without tiles.
Tiling = Callable[[Sequence[int], Sequence[int]], tuple[NDArray[np.int32], tuple[tuple[int, int], ...]]]


@dataclass(frozen=True)
class StepInputs:
    """One step, on the device but for ``starts``, ``fresh`` (see ``Tiling``) and ``rows``.

    ``sampled_from_S`` is the token whose logits each of ``rows`` uses. Media tensors index tokens and rows of
    the embedding memory; they are on the host."""

    token_ids_T: torch.Tensor
    rows_T: torch.Tensor
    positions_T: torch.Tensor
    tiles_N2: torch.Tensor
    sampled_from_S: torch.Tensor
    sample_rows_S: torch.Tensor
    starts: tuple[int, ...]
    fresh: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]
    media_tokens_A: torch.Tensor | None = None
    media_rows_A: torch.Tensor | None = None


class DeviceRows(RowStates):
    """Rows 0 .. ``max_rows`` - 1 with tables of ``max_blocks`` blocks in each of ``num_groups`` groups."""

    def __init__(
        self,
        device: Device,
        num_groups: int,
        max_rows: int,
        max_blocks: int,
        eos_token_ids: tuple[int, ...],
        rows_per_block: int,
        tiling: Tiling,
    ) -> None:
        super().__init__(eos_token_ids, rows_per_block)
        self._device = device
        self.tables_GRM = torch.zeros(
            num_groups, max_rows, max_blocks, dtype=torch.int32, device=device.device
        )
        self.last_R = torch.zeros(max_rows, dtype=torch.int32, device=device.device)
        self._tiling = tiling

    def prepare(self, steps: Sequence[RowStep]) -> StepInputs:
        """Bring a step's inputs to the device, after ``update_tables``; ``steps`` is not empty."""
        counts = [len(step.token_ids) for step in steps]
        starts = (0, *accumulate(counts))
        rows = tuple(row for step in steps for row in step.sample_rows)
        tiles, fresh = self._tiling(starts, [step.first for step in steps])
        parts = (
            np.array([token for step in steps for token in step.token_ids], np.int32),
            np.repeat(np.array([step.row for step in steps], np.int32), counts),
            _positions(steps, counts, starts),
            tiles.reshape(-1),
            np.repeat(np.array(starts[1:], np.int32) - 1, [len(step.sample_rows) for step in steps]),
            np.array(rows, np.int32),
        )
        on_device = torch.split(self._device.upload(np.concatenate(parts)), [len(part) for part in parts])
        token_ids, rows_T, positions, tiles_2N, sampled_from, sample_rows = on_device
        media = self.media(steps, starts) or (None, None)
        return StepInputs(
            token_ids,
            rows_T,
            positions,
            tiles_2N.view(-1, 2),
            sampled_from,
            sample_rows,
            starts,
            fresh,
            rows,
            *media,
        )

    def update_tables(self, steps: Sequence[RowStep]) -> None:
        """Bring the blocks that are new in these rows to the device."""
        _, num_rows, length = self.tables_GRM.shape
        places: list[int] = []
        blocks: list[int] = []
        for step in steps:
            for group, ids in enumerate(step.blocks):
                if ids:
                    at = (group * num_rows + step.row) * length + step.block_start
                    places += range(at, at + len(ids))
                    blocks += ids
        if places:
            where, what = self._device.upload(np.array([places, blocks], np.int32).reshape(-1)).chunk(2)
            self.tables_GRM.view(-1).index_copy_(0, where.long(), what)

    def is_decode(self, steps: Sequence[RowStep]) -> bool:
        """Whether each row has one token and wants the next, and nothing of it comes from media."""
        return all(
            len(step.token_ids) == 1
            and step.sample_rows == (step.row,)
            and step.first >= self.num_prompt_tokens(step.row)
            for step in steps
        )

    @staticmethod
    def decode_inputs(steps: Sequence[RowStep], size: int) -> NDArray[np.int32]:
        """[3, size]: token, row and position of each row of a decode step, and padding at position -1."""
        values = np.full((3, size), PADDING, np.int32)
        values[:, : len(steps)] = [
            [step.token_ids[0] for step in steps],
            [step.row for step in steps],
            [step.first for step in steps],
        ]
        return values


def _positions(steps: Sequence[RowStep], counts: Sequence[int], starts: Sequence[int]) -> NDArray[np.int32]:
    first = np.array([step.first for step in steps], np.int32) - np.array(starts[:-1], np.int32)
    return (np.repeat(first, counts) + np.arange(starts[-1])).astype(np.int32)
