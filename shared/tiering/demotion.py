"""Records on their way from memory to the lower tiers: off the request path, bounded, at second use.

Owns admission, the bound and who is asked again when; not the blocks, which stay pinned meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.clock import Clock
from shared.tiering.chain import TierChain
from shared.tiering.eviction import SecondUse
from shared.tiering.offload import StoreItem
from shared.tiering.reactor import Reactor

#: What was written or asked to be kept so long ago is offered to the lower tiers again when it is used: so
#: that they see that it is, and get back what they gave up meanwhile.
REFRESH_S = 60.0


@dataclass(frozen=True)
class Candidate:
    """A record in memory that was used. ``make`` builds the record, in another thread, between ``pin`` and
    ``unpin``: until then its bytes stay as they are. ValueError: this one cannot be a record."""

    make: Callable[[], StoreItem]
    pin: Callable[[], None]
    unpin: Callable[[], None]


class Demotions:
    """At most ``max_records`` at a time; what finds no room is not written this time."""

    def __init__(
        self, chain: TierChain, reactor: Reactor, clock: Clock, max_records: int, num_remembered: int
    ) -> None:
        self._chain = chain
        self._reactor = reactor
        self._clock = clock
        self._max_records = max_records
        self._num_remembered = num_remembered
        self._num_storing = 0
        self._admission: SecondUse[bytes] = SecondUse(num_remembered)
        self._asked: dict[bytes, float] = {}

    def known(self, name: bytes) -> None:
        """A lower tier holds this one: it was just loaded from there."""
        self._remember(name)
        self._admission.admits((name,))

    def used(self, names: Sequence[bytes]) -> list[bool]:
        """What goes by these names was used (its offer counts, too): for each, whether it is let in below,
        because it was used before."""
        if self._chain.is_empty:
            return [False] * len(names)
        return self._admission.admits(names)

    def write(self, names: Sequence[bytes], candidate: Callable[[int], Candidate]) -> None:
        """Give what goes by these names to the lower tiers, in this order, unless they were asked not long
        ago. ``candidate`` says of the n-th name what it is."""
        fresh_from = self._clock.now() - REFRESH_S
        due = [n for n, name in enumerate(names) if self._asked.get(name, fresh_from) <= fresh_from]
        chosen = due[: self._max_records - self._num_storing]
        if chosen and self._chain.writable:
            self._begin([names[n] for n in chosen], [candidate(n) for n in chosen])

    def _begin(self, names: Sequence[bytes], candidates: Sequence[Candidate]) -> None:
        self._num_storing += len(names)
        for name, candidate in zip(names, candidates, strict=True):
            candidate.pin()
            self._remember(name)

        def made(items: list[StoreItem | None]) -> None:
            self._chain.store([item for item in items if item], lambda stored: ended(items, stored))

        def ended(items: Sequence[StoreItem | None], stored: frozenset[bytes]) -> None:
            self._num_storing -= len(names)
            for name, candidate, item in zip(names, candidates, items, strict=True):
                candidate.unpin()
                if item is not None and item.key not in stored:
                    self._asked.pop(name, None)

        self._reactor.elsewhere(lambda: [_made(candidate) for candidate in candidates], made)

    def _remember(self, name: bytes) -> None:
        self._asked.pop(name, None)
        self._asked[name] = self._clock.now()
        if len(self._asked) > self._num_remembered:
            del self._asked[next(iter(self._asked))]


def _made(candidate: Candidate) -> StoreItem | None:
    try:
        return candidate.make()
    except ValueError:
        return None
