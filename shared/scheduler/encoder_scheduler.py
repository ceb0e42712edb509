"""The encoder's scheduler: media items in order of arrival, as many a step as its budget allows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from shared.step import EncodeItem, EncodePlan


@dataclass(frozen=True)
class EncoderLimits:
    """``max_rows``: embedding rows a step may produce; ``max_items``: media items a step may take."""

    max_rows: int
    max_items: int


class EncoderScheduler:
    """Batches encode items. Owned by the encoder's engine thread."""

    def __init__(self, limits: EncoderLimits) -> None:
        self._limits = limits
        self._waiting: deque[EncodeItem] = deque()
        self._step_id = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, item: EncodeItem) -> None:
        """Queue one item; its blocks are already allocated."""
        self._waiting.append(item)

    def schedule(self) -> EncodePlan | None:
        """The next batch, or None. One item always fits, however large."""
        batch: list[EncodeItem] = []
        rows = 0
        while self._waiting and len(batch) < self._limits.max_items:
            if batch and rows + self._waiting[0].num_rows > self._limits.max_rows:
                break
            item = self._waiting.popleft()
            rows += item.num_rows
            batch.append(item)
        if not batch:
            return None
        self._step_id += 1
        return EncodePlan(self._step_id, tuple(batch))
