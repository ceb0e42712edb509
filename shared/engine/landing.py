"""Blocks of one block table that arrive from elsewhere: a prefill worker's handoff or the kv_store.

A landing owns the destination blocks of its pulls until each pull is settled: closed early, they go
to quarantine and come back to the pool only when no late landing is possible any more.
"""

from __future__ import annotations

from collections.abc import Callable

from shared.engine.desk import PullDesk
from shared.errors import OutOfBlocks
from shared.kv_cache.manager import KVCacheManager
from shared.transfer.handoff import BlockPull, Pull, PullOutcome
from shared.types.transfer import AgentInfo, BlockRef


class Landing:
    """Pulls into the table of ``key``, whose first ``num_held`` blocks were there already."""

    def __init__(
        self,
        key: str,
        num_held: int,
        kv: KVCacheManager,
        desk: PullDesk,
        deadline_s: float,
        changed: Callable[[PullOutcome], None],
    ) -> None:
        self.key = key
        self.num_held = num_held
        self._kv = kv
        self._desk = desk
        self._deadline_s = deadline_s
        self._changed = changed
        self._landed: list[set[int]] = [set() for _ in kv.spec.groups]
        self._flying: dict[str, tuple[int, list[int]]] = {}
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
        """Pull ``refs`` into table indices ``first`` .. of ``group``; held ones and those beyond the
        table are skipped; nothing happens once the table was given up."""
        if self._closed:
            return
        table = self._kv.table(self.key)[group]
        indices = [first + i for i in range(len(refs)) if self.num_held <= first + i < len(table)]
        if not indices:
            return
        pull_id = self._desk.new_id()
        self._flying[pull_id] = (group, indices)
        blocks = tuple(BlockPull(refs[i - first], table[i]) for i in indices)
        heads = self._kv.spec.groups[group].num_kv_heads
        pull = Pull(
            pull_id=pull_id,
            producer=producer,
            region="kv",
            group=group,
            blocks=blocks,
            checksum_heads=heads,
            deadline_s=self._deadline_s,
        )
        self._desk.pull(pull, lambda o: self._on_outcome(o, blocks), lambda: self._on_settled(pull_id))

    def close(self) -> None:
        """Give the table back; blocks still being written go to quarantine until settled."""
        if self._closed:
            return
        self._closed = True
        in_flight: dict[int, list[int]] = {}
        for group, indices in self._flying.values():
            in_flight.setdefault(group, []).extend(indices)
        tables = self._kv.table(self.key)
        for pull_id, (group, indices) in self._flying.items():
            self._quarantined[pull_id] = (group, [tables[group][i] for i in indices])
            self._desk.cancel(pull_id)
        self._kv.close(self.key, in_flight)

    def _on_outcome(self, outcome: PullOutcome, blocks: tuple[BlockPull, ...]) -> None:
        group, indices = self._flying.pop(outcome.pull_id)
        self.nbytes += outcome.nbytes
        self.backend = outcome.backend or self.backend
        if not self._closed:
            self._take(outcome, group, indices, blocks)
        self._changed(outcome)

    def _take(
        self, outcome: PullOutcome, group: int, indices: list[int], blocks: tuple[BlockPull, ...]
    ) -> None:
        bad = [index for index, ok in zip(indices, outcome.ok, strict=True) if not ok]
        for index, ok, block in zip(indices, outcome.ok, blocks, strict=True):
            if ok:
                self._landed[group].add(index)
                self._checksums[group, block.local_block] = block.remote.checksums
        if bad and not outcome.terminal:
            try:
                self._quarantined[outcome.pull_id] = (group, self._kv.replace(self.key, group, bad))
            except OutOfBlocks:
                # No fresh blocks to take the place of the unsafe ones: give up the whole table.
                self._flying[outcome.pull_id] = (group, bad)
                self.close()
                del self._flying[outcome.pull_id]
                self.lost = True

    def _on_settled(self, pull_id: str) -> None:
        group, block_ids = self._quarantined.pop(pull_id, (0, []))
        if block_ids:
            self._kv.release_quarantined(group, block_ids)
