"""What a worker knows of one request between its Start and its Released."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.scheduler.sequence import Sequence
from shared.types.request import GenerationRequest


@dataclass(slots=True)
class LiveRequest:
    """One started request. ``handoff_id`` names its blocks to the outside (PREFILL).
    ``num_announced``: blocks whose BlocksCommitted was sent. ``unwanted``: choices that were aborted."""

    request: GenerationRequest
    mode: str
    handoff_id: str = ""
    sequences: dict[int, Sequence] = field(default_factory=dict)
    num_announced: int = 0
    held: bool = False
    unwanted: set[int] = field(default_factory=set)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def parent(self) -> Sequence:
        """The sequence that computes the prompt."""
        return self.sequences[self.request.choices[0]]

    @property
    def all_unwanted(self) -> bool:
        """Every choice was aborted."""
        return self.unwanted.issuperset(self.sequences)

    @property
    def all_done(self) -> bool:
        """Every choice finished or was stopped."""
        return all(sequence.done for sequence in self.sequences.values())

    @property
    def gone(self) -> bool:
        """Every choice is done and holds no blocks any more."""
        return all(s.done and not s.kv_open and not s.inflight for s in self.sequences.values())


def sequences_of(request: GenerationRequest, mode: str, arrival: int) -> dict[int, Sequence]:
    """One sequence a choice; the first carries the others as its forks."""
    sequences = {choice: Sequence(request, choice, mode, arrival) for choice in request.choices}
    first, *others = sequences.values()
    first.children = tuple(others)
    return sequences
