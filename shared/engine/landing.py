"""Blocks of one block table that arrive from elsewhere: a prefill worker's handoff or the kv_store.

A landing owns the destination blocks of its pulls until each pull is settled: closed early, they go
to quarantine and come back to the pool only when no late landing is possible any more. Everything here is in
our own blocks, of whatever size the producer's are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shared.engine.desk import PullDesk
from shared.errors import OutOfBlocks
from shared.kv_cache.manager import KVCacheManager
from shared.transfer.handoff import BlockPull, Pull, PullOutcome, Reslice
from shared.transfer.regroup import Regroup
from shared.types.transfer import AgentInfo, BlockRef


class _Part(NamedTuple):
    """What one pull fills: indices of the table of a group, and how."""

    group: int
    indices: list[int]
    blocks: tuple[BlockPull, ...]
    reslice: Reslice | None = None

    def landed(self, outcome: PullOutcome) -> list[tuple[int, ...] | None]:
        """The checksums of each block that it filled; None for one that did not arrive."""
        if self.reslice is None:
            return [
                block.remote.checksums if ok else None
                for block, ok in zip(self.blocks, outcome.ok, strict=True)
            ]
        if not outcome.made:
            return [None] * len(self.indices)
        first = self.indices[-1] + 1 - len(self.reslice.into)
        return [outcome.made[index - first] or None for index in self.indices]


class Landing:
    """Pulls into the table of ``key``, whose first ``num_held`` blocks were there already. ``num_tokens`` are
    to come in all; without it only blocks of our own size are taken."""

    def __init__(
        self,
        key: str,
        num_held: int,
        kv: KVCacheManager,
        desk: PullDesk,
        deadline_s: float,
        changed: Callable[[PullOutcome], None],
        num_tokens: int | None = None,
    ) -> None:
        self.key = key
        self.num_held = num_held
        self._kv = kv
        self._desk = desk
        self._deadline_s = deadline_s
        self._changed = changed
        self._num_tokens = num_tokens
        self._asked: list[set[int]] = [set() for _ in kv.spec.groups]
        self._landed: list[set[int]] = [set() for _ in kv.spec.groups]
        self._regroups: dict[tuple[int, int], Regroup] = {}
        self._flying: dict[str, _Part] = {}
        self._quarantined: dict[str, tuple[int, list[int]]] = {}
        self._checksums: dict[tuple[int, int], tuple[int, ...]] = {}
        self._closed = False
        self.lost = False
        self.nbytes = 0
        self.backend = ""

    @property
    def idle(self) -> bool:
        """No pull is awaited."""
        return not self._flying

    def num_valid(self, num_blocks: int) -> int:
        """Blocks, counted from the first, that are held or landed and verified in every group."""
        count = self.num_held
        while count < num_blocks and all(count in landed for landed in self._landed):
            count += 1
        return count

    def checksums(self, num_blocks: int) -> dict[tuple[int, int], tuple[int, ...]]:
        """Checksums of the landed blocks among the first ``num_blocks``."""
        return {
            (group, table[index]): self._checksums[group, table[index]]
            for group, table in enumerate(self._kv.table(self.key))
            for index in range(self.num_held, num_blocks)
        }

    def pull(self, producer: AgentInfo, group: int, first: int, refs: tuple[BlockRef, ...]) -> None:
        """Pull ``refs``, the producer's blocks ``first`` .. of ``group``, into the table. Blocks that are
        held, asked for before, or beyond the table are skipped, and those whose size no pull can bring to
        ours; nothing happens once the table was given up."""
        if self._closed or group >= len(self._asked):
            return
        part = self._part(producer, group, first, refs)
        if part is None:
            return
        self._asked[group].update(part.indices)
        pull_id = self._desk.new_id()
        self._flying[pull_id] = part
        pull = Pull(
            pull_id=pull_id,
            producer=producer,
            region="kv",
            group=group,
            blocks=part.blocks,
            checksum_heads=self._kv.spec.groups[group].num_kv_heads,
            deadline_s=self._deadline_s,
            reslice=part.reslice,
        )
        self._desk.pull(pull, self._on_outcome, lambda: self._on_settled(pull_id))

    def _part(self, producer: AgentInfo, group: int, first: int, refs: tuple[BlockRef, ...]) -> _Part | None:
        table, asked = self._kv.table(self.key)[group], self._asked[group]
        ours = self._kv.spec.block_size
        theirs = producer.layout.block_size if producer.layout is not None else ours
        if theirs == ours:
            last = min(first + len(refs), len(table))
            indices = [i for i in range(max(first, self.num_held), last) if i not in asked]
            blocks = tuple([BlockPull(refs[i - first], table[i]) for i in indices])
            return _Part(group, indices, blocks) if indices else None
        if self._num_tokens is None or theirs < 1 or (theirs % ours and ours % theirs):
            return None
        planes = 2 * self._kv.spec.groups[group].num_layers
        new = Regroup(theirs, ours, self._num_tokens, planes)
        regroup = self._regroups.setdefault((group, theirs), new)
        wanted = [i for i in range(self.num_held, len(table)) if i not in asked]
        found = regroup.add(first, refs, table, wanted)
        return None if found is None else _Part(group, found.targets, found.blocks, found.reslice)

    def close(self) -> None:
        """Give the table back; blocks still being written go to quarantine until settled."""
        if self._closed:
            return
        self._closed = True
        in_flight: dict[int, list[int]] = {}
        tables = self._kv.table(self.key)
        for pull_id, part in self._flying.items():
            in_flight.setdefault(part.group, []).extend(part.indices)
            self._quarantined[pull_id] = (part.group, [tables[part.group][i] for i in part.indices])
            self._desk.cancel(pull_id)
        self._kv.close(self.key, in_flight)

    def _on_outcome(self, outcome: PullOutcome) -> None:
        part = self._flying.pop(outcome.pull_id)
        self.nbytes += outcome.nbytes
        self.backend = outcome.backend or self.backend
        if not self._closed:
            self._take(outcome, part)
        self._changed(outcome)

    def _take(self, outcome: PullOutcome, part: _Part) -> None:
        group, table = part.group, self._kv.table(self.key)[part.group]
        bad: list[int] = []
        for index, checksums in zip(part.indices, part.landed(outcome), strict=True):
            if checksums is None:
                bad.append(index)
            else:
                self._landed[group].add(index)
                self._checksums[group, table[index]] = checksums
        if bad and not outcome.terminal:
            try:
                self._quarantined[outcome.pull_id] = (group, self._kv.replace(self.key, group, bad))
            except OutOfBlocks:
                # No fresh blocks to take the place of the unsafe ones: give up the whole table.
                self._flying[outcome.pull_id] = part._replace(indices=bad)
                self.close()
                del self._flying[outcome.pull_id]
                self.lost = True

    def _on_settled(self, pull_id: str) -> None:
        group, block_ids = self._quarantined.pop(pull_id, (0, []))
        if block_ids:
            self._kv.release_quarantined(group, block_ids)
