"""A small scheduler for tests: drives a witness runner with random chunks, batches, blocks and forks."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.runner.witness import WitnessEncoderRunner, WitnessRunner
from shared.runner.witness_config import WitnessConfig
from shared.step import (
    LAST_SAMPLED,
    BlockCopy,
    EncodeItem,
    EncodePlan,
    MediaRows,
    NewRow,
    RowStep,
    StepPlan,
    StepResult,
)
from shared.types.kv import KVCacheSpec, KVGroupSpec
from shared.types.request import MediaItem, SamplingParams

ROWS_PER_BLOCK = 3


@dataclass
class Job:
    """One request: a prompt, its parameters, media as (offset, num_tokens, data), and how many choices."""

    prompt: list[int]
    sampling: SamplingParams
    media: list[tuple[int, int, bytes]] = field(default_factory=list)
    n: int = 1


@dataclass
class _Choice:
    job: Job
    index: int
    row: int
    emitted: list[int] = field(default_factory=list)
    planned: int = 0  # tokens whose sampling was planned
    computed: int = 0  # positions whose KV was planned
    tables: list[list[int]] = field(default_factory=list)
    tail_copies: list[BlockCopy] = field(default_factory=list)
    sent: bool = False  # the runner has the tables
    finish: str = ""


class Driver:
    """Owns arenas and a runner; ``run`` returns the answers of all choices of all jobs."""

    def __init__(
        self,
        config: WitnessConfig,
        spec: KVCacheSpec,
        rnd: random.Random,
        num_blocks: int = 400,
        depth: int = 1,
        tp_size: int = 1,
    ) -> None:
        self.config, self.spec, self.rnd, self.depth = config, spec, rnd, depth
        self.arenas = [
            memoryview(bytearray(rnd.randbytes(num_blocks * group.extent_bytes(spec.block_size) // tp_size)))
            for _ in range(tp_size)
            for group in spec.groups
        ]
        self.ec = memoryview(bytearray(rnd.randbytes(64 * ROWS_PER_BLOCK * config.row_bytes)))
        self.encoder = WitnessEncoderRunner(config, self.ec, ROWS_PER_BLOCK)
        self.runner = WitnessRunner(
            config, spec, self.arenas, ec_data=self.ec, rows_per_block=ROWS_PER_BLOCK, tp_size=tp_size
        )
        self.free = [rnd.sample(range(num_blocks), num_blocks) for _ in spec.groups]
        self.free_ec = rnd.sample(range(64), 64)
        self.steps = 0
        self.pending: deque[tuple[StepResult, dict[int, _Choice]]] = deque()

    def run(self, jobs: Sequence[Job]) -> list[list[tuple[tuple[int, ...], str]]]:
        rows = iter(range(1000))
        all_choices = [[_Choice(job, i, next(rows)) for i in range(job.n)] for job in jobs]
        waiting = list(all_choices)
        while any(not choice.finish for group in all_choices for choice in group):
            new_rows = self._admit(waiting)
            steps, copies, sampled = [], [], {}
            for group in all_choices:
                if group in waiting:
                    continue
                for choice in group:
                    if choice.finish or self.rnd.random() < 0.3:
                        continue
                    step = self._advance(choice, group, copies)
                    if step is not None:
                        steps.append(step)
                        sampled.update({c.row: c for c in group if c.row in step.sample_rows})
                        if len(step.sample_rows) > 1:
                            break  # the other choices' tails exist once this step has run
            self.steps += 1
            plan = StepPlan(self.steps, (), tuple(new_rows), tuple(copies), tuple(steps))
            self.pending.append((self.runner.execute(plan).result(), sampled))
            while len(self.pending) >= self.depth:
                self._update()
        return [[(tuple(c.emitted), c.finish) for c in group] for group in all_choices]

    def encode(self, data: bytes, num_rows: int) -> tuple[tuple[int, ...], int]:
        """Blocks and checksum of one encoded item."""
        blocks = tuple(self.free_ec.pop() for _ in range(-(-num_rows // ROWS_PER_BLOCK)))
        result = self.encoder.execute(EncodePlan(1, (EncodeItem("h", data, (), num_rows, blocks),)))
        return blocks, result.checksums[0]

    def _admit(self, waiting: list[list[_Choice]]) -> list[NewRow]:
        new_rows: list[NewRow] = []
        while waiting and self.rnd.random() < 0.7:
            group = waiting.pop(0)
            job = group[0].job
            media = tuple(
                MediaRows(MediaItem("h", offset, count), self.encode(data, count)[0])
                for offset, count, data in job.media
            )
            for c in group:
                c.tables = [[] for _ in self.spec.groups]
                new_rows.append(
                    NewRow(c.row, "r", c.index, tuple(job.prompt), len(job.prompt), job.sampling, media)
                )
        return new_rows

    def _advance(self, choice: _Choice, group: list[_Choice], copies: list[BlockCopy]) -> RowStep | None:
        prompt = choice.job.prompt
        if choice.computed < len(prompt):
            if choice is not group[0]:
                return None
            count = self.rnd.randint(1, len(prompt) - choice.computed)
            tokens = tuple(prompt[choice.computed : choice.computed + count])
            ends = choice.computed + count == len(prompt)
            step = self._step(choice, tokens, tuple(c.row for c in group) if ends else ())
            if ends:
                self._fork(group)
            return step
        if choice.planned - len(choice.emitted) >= self.depth:
            return None
        copies.extend(choice.tail_copies)
        choice.tail_copies = []
        known = choice.planned == len(choice.emitted) and self.rnd.random() < 0.5
        step = self._step(choice, (choice.emitted[-1] if known else LAST_SAMPLED,), (choice.row,))
        choice.planned += 1
        return step

    def _step(self, choice: _Choice, tokens: tuple[int, ...], sample_rows: tuple[int, ...]) -> RowStep:
        stop = choice.computed + len(tokens)
        start = len(choice.tables[0]) if choice.sent else 0
        for table, free in zip(choice.tables, self.free, strict=True):
            while len(table) * self.spec.block_size < stop:
                table.append(free.pop())
        blocks = tuple(tuple(table[start:]) for table in choice.tables)
        step = RowStep(choice.row, choice.computed, tokens, start, blocks, sample_rows)
        choice.computed, choice.sent = stop, True
        return step

    def _fork(self, group: list[_Choice]) -> None:
        """All choices share the prompt's full blocks; each later one copies the tail before it
        first writes there."""
        first = group[0]
        full = first.computed // self.spec.block_size
        for choice in group:
            choice.planned = 1
            choice.computed = first.computed
        for choice in group[1:]:
            for g, table in enumerate(first.tables):
                choice.tables[g] = table[:full]
                if len(table) > full:
                    choice.tables[g].append(self.free[g].pop())
                    choice.tail_copies.append(BlockCopy(g, table[full], choice.tables[g][full]))

    def _update(self) -> None:
        result, sampled = self.pending.popleft()
        for row, token in zip(result.rows, result.token_ids, strict=True):
            choice = sampled[row]
            if choice.finish:
                continue  # planned before the finish was known: the extra slot is discarded
            choice.emitted.append(token)
            params = choice.job.sampling
            if (
                token == self.config.eos_token_id and not params.ignore_eos
            ) or token in params.stop_token_ids:
                choice.finish = "stop"
            elif len(choice.emitted) == params.max_tokens:
                choice.finish = "length"


def one_group(config: WitnessConfig, block_size: int) -> KVCacheSpec:
    """The whole model in one group."""
    return KVCacheSpec(block_size, (KVGroupSpec(config.num_layers, config.num_kv_heads, 1, "uint64"),))
