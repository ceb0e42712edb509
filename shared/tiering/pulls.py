"""The store's pulls: who asked for which, and what becomes of it. Owns ids and callbacks; event loop only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from shared.transfer.handoff import BlockPull, PackedCheck, Pull, PullOutcome
from shared.types.transfer import AgentInfo


class PullPort(Protocol):
    """What is needed of a puller."""

    def submit(self, pull: Pull) -> None: ...


class Pulls:
    """Pulls into one region. ``observe`` hears of every outcome."""

    def __init__(self, region: str, observe: Callable[[PullOutcome], None]) -> None:
        self._region = region
        self._observe = observe
        self._puller: PullPort | None = None
        self._next = 0
        self._done: dict[str, Callable[[PullOutcome], None]] = {}
        self._settled: dict[str, Callable[[], None]] = {}

    def bind(self, puller: PullPort) -> None:
        """Give it the puller; before the first pull."""
        self._puller = puller

    def begin(
        self,
        producer: AgentInfo,
        group: int,
        blocks: Sequence[BlockPull],
        done: Callable[[PullOutcome], None],
        settled: Callable[[], None],
        *,
        checksum_heads: int = 0,
        packed: PackedCheck | None = None,
    ) -> None:
        """Begin one pull. ``done`` is called once; after an outcome that is not terminal ``settled`` is, once
        the destination can be written no more."""
        if self._puller is None:
            raise RuntimeError("no puller bound")
        self._next += 1
        pull_id = f"offer-{self._next}"
        self._done[pull_id], self._settled[pull_id] = done, settled
        self._puller.submit(
            Pull(
                pull_id=pull_id,
                producer=producer,
                region=self._region,
                group=group,
                blocks=tuple(blocks),
                checksum_heads=checksum_heads,
                packed=packed,
            )
        )

    def on_outcome(self, outcome: PullOutcome) -> None:
        """A pull has ended, or was given up."""
        self._observe(outcome)
        done = self._done.pop(outcome.pull_id)
        if outcome.terminal:
            del self._settled[outcome.pull_id]
        done(outcome)

    def on_settled(self, pull_id: str) -> None:
        """Nothing of this pull can land any more."""
        self._settled.pop(pull_id)()
