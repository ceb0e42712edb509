"""The witness runner: the real plan, the real paged memory, and digests in place of a model.

Owns the rows and the order of a step's effects. Owns no policy and no KV arithmetic (``paged``).
No torch. The definition is in ``shared.runner.witness_config``.

Shapes: R = rows, S = row steps that are sampled, C = candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from shared.runner.base import DoneStep, PendingStep, Runner
from shared.runner.witness.encoder import EmbeddingRows
from shared.runner.witness.paged import PagedWitness, UInts, mix
from shared.runner.witness.ranks import PagedRanks, paged_ranks
from shared.runner.witness_config import WitnessConfig
from shared.sampling.candidates import sample_candidates
from shared.sampling.row import is_plain_greedy
from shared.step import LAST_SAMPLED, MediaRows, NewRow, RowStep, StepPlan, StepResult
from shared.types.kv import KVCacheSpec
from shared.types.request import SamplingParams, TokenLogprobs

_WEYL = 0x9E37_79B9_7F4A_7C15


@dataclass(slots=True)
class _Row:
    """``history`` grows with each token sampled for the row; ``media_end``: no placeholder from here on."""

    history: list[int]
    choice: int
    num_prompt_tokens: int
    params: SamplingParams
    media: tuple[MediaRows, ...]
    media_end: int
    plain_greedy: bool


class WitnessRunner(Runner):
    """Runs steps over the block data of the arenas, one writable memoryview a KV group.

    ``ec_data`` is the ``ec`` arena's, needed when prompts have media. Groups are consecutive layers.
    With ``tp_size`` ranks, each of which has its share of the heads in memory of its own, ``kv_data`` holds
    the groups of each rank in turn.
    """

    def __init__(
        self,
        config: WitnessConfig,
        spec: KVCacheSpec,
        kv_data: Sequence[memoryview],
        *,
        eos_token_ids: Sequence[int] | None = None,
        ec_data: memoryview | None = None,
        rows_per_block: int = 1,
        tp_size: int = 1,
    ) -> None:
        self._config = config
        self._eos_token_ids = tuple(eos_token_ids or (config.eos_token_id,))
        if len(kv_data) != tp_size * len(spec.groups):
            raise ValueError("one memory a KV group and rank is needed")
        self._groups: list[PagedWitness | PagedRanks] = []
        first_layer = 0
        for index, group in enumerate(spec.groups):
            memories = kv_data[index :: len(spec.groups)]
            self._groups.append(paged_ranks(config, group, spec.block_size, memories, first_layer))
            first_layer += group.num_layers
        self._embeddings = EmbeddingRows(ec_data or memoryview(b""), rows_per_block, config.row_bytes)
        self._rows: dict[int, _Row] = {}
        num_text = config.candidates - 1
        self._segment = config.num_text_tokens // num_text
        steps = [(i + 1) * _WEYL % 2**64 for i in range(config.candidates)]
        self._steps_C: UInts = np.array(steps, dtype=np.uint64)
        self._ranks_C: UInts = np.arange(config.candidates, dtype=np.uint64)

    def execute(self, plan: StepPlan) -> PendingStep:
        for row in plan.free_rows:
            self._rows.pop(row, None)
        for new in plan.new_rows:
            self._rows[new.row] = _row(new)
        for copy in plan.copies:
            self._groups[copy.group].copy_block(copy.src, copy.dst)
        self._compute(plan.rows)
        rows, token_ids, logprobs = self._sample([step for step in plan.rows if step.sample_rows])
        return DoneStep(
            StepResult(
                step_id=plan.step_id,
                rows=rows,
                token_ids=token_ids,
                logprobs=logprobs,
                checksums=tuple(self._groups[seal.group].checksums(seal.block_id) for seal in plan.seals),
            )
        )

    def close(self) -> None:
        groups, self._groups = self._groups, []
        for group in groups:
            group.close()
        self._embeddings.close()
        self._rows.clear()

    def _compute(self, steps: Sequence[RowStep]) -> None:
        """Update the block tables and write the entries of all rows."""
        single: list[tuple[int, int, int]] = []  # row, position, token id
        for step in steps:
            row_id = step.row
            for group, block_ids in zip(self._groups, step.blocks, strict=True):
                if block_ids:
                    group.set_blocks(row_id, step.block_start, block_ids)
            row = self._rows[row_id]
            if len(step.token_ids) == 1 and step.first >= row.media_end:
                token_id = step.token_ids[0]
                single.append((row_id, step.first, row.history[-1] if token_id == LAST_SAMPLED else token_id))
            else:
                self._extend(row, step)
        if single:
            rows_R, positions_R, tokens_R = np.array(single, dtype=np.int64).T
            for group in self._groups:
                group.append(rows_R, positions_R, tokens_R.astype(np.uint64))

    def _extend(self, row: _Row, step: RowStep) -> None:
        """Write a run of positions, placeholders among them."""
        words = [row.history[-1] if i == LAST_SAMPLED else i for i in step.token_ids]
        kinds = [0] * len(words)
        stop = step.first + len(words)
        for media in row.media:
            offset = media.item.offset
            for position in range(max(step.first, offset), min(stop, offset + media.item.num_tokens)):
                index = position - step.first
                kinds[index] = 1
                words[index] = self._embeddings.word(media.block_ids, position - offset, self._config.key)
        for group in self._groups:
            group.extend(step.row, step.first, kinds, words)

    def states(self, rows: Sequence[int], lengths: Sequence[int]) -> UInts:
        """Each row's state after its first ``lengths`` tokens, read from memory now; all ranks'."""
        parts = [group.states(rows, lengths) for group in self._groups]
        totals = parts[0] if len(parts) == 1 else [sum(part) % 2**64 for part in zip(*parts, strict=True)]
        return np.array(totals, dtype=np.uint64)

    def _sample(
        self, steps: Sequence[RowStep]
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[TokenLogprobs | None, ...]]:
        if not steps:
            return (), (), ()
        lengths = [step.first + len(step.token_ids) for step in steps]
        states_S = self.states([step.row for step in steps], lengths)
        ids_SC, logits_SC = self._candidates(states_S)
        likeliest = ids_SC[np.arange(len(steps)), logits_SC.argmax(axis=1)].tolist()
        ids, logits = ids_SC.tolist(), logits_SC.tolist()
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        for index, step in enumerate(steps):
            for row_id in step.sample_rows:
                row = self._rows[row_id]
                if row.plain_greedy:
                    token_id, reported = likeliest[index], None
                else:
                    token_id, reported = sample_candidates(
                        ids[index],
                        logits[index],
                        row.params,
                        choice=row.choice,
                        history=row.history,
                        num_prompt_tokens=row.num_prompt_tokens,
                        eos_token_ids=self._eos_token_ids,
                    )
                row.history.append(token_id)
                token_ids.append(token_id)
                logprobs.append(reported)
        return tuple(chain.from_iterable(s.sample_rows for s in steps)), tuple(token_ids), tuple(logprobs)

    def _candidates(self, states_S: UInts) -> tuple[np.ndarray, np.ndarray]:
        """Ids and logits, shapes [S, C], ids ascending."""
        count = len(self._steps_C)
        draws_SC = mix(states_S[:, None] + self._steps_C)
        segment = np.uint64(self._segment)
        ids_SC = (draws_SC % segment + self._ranks_C * segment).astype(np.int64)
        logits_SC = ((draws_SC >> np.uint64(48)) * np.uint64(count) + self._ranks_C) / 8192.0 / count
        ids_SC[:, -1] = self._config.eos_token_id
        ended_S = draws_SC[:, -1] % np.uint64(self._config.eos_period) == 0
        logits_SC[:, -1] = np.where(ended_S, 9.0, -8.0)
        return ids_SC, logits_SC


def _row(new: NewRow) -> _Row:
    return _Row(
        history=list(new.token_ids),
        choice=new.choice,
        num_prompt_tokens=new.num_prompt_tokens,
        params=new.sampling,
        media=new.media,
        media_end=max((m.item.offset + m.item.num_tokens for m in new.media), default=0),
        plain_greedy=is_plain_greedy(new.sampling),
    )
