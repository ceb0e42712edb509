"""All that stands below memory, as one thing to hand on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.clock import Clock
from shared.tiering.chain import TierChain
from shared.tiering.demotion import Demotions
from shared.tiering.offload import OffloadTier
from shared.tiering.promotion import Promotions
from shared.tiering.reactor import Reactor
from shared.tiering.record import PayloadCheck, verify_payload


@dataclass(frozen=True)
class LowerTiers:
    """``deadline_s``: a look-up waits at most so long for records; what came by then counts. ``upkeep``: to
    be done now and then, none of it waits. ``check_payload``: of what comes up."""

    chain: TierChain
    promotions: Promotions
    demotions: Demotions
    reactor: Reactor
    deadline_s: float
    upkeep: tuple[Callable[[], None], ...] = ()
    check_payload: PayloadCheck = verify_payload


def lower_tiers(
    tiers: Sequence[OffloadTier],
    reactor: Reactor,
    clock: Clock,
    *,
    deadline_s: float,
    max_loads: int,
    max_stores: int,
    num_remembered: int,
    upkeep: Sequence[Callable[[], None]] = (),
    check_payload: PayloadCheck = verify_payload,
) -> LowerTiers:
    """The machinery over ``tiers``, nearest first; over none it finds and keeps nothing."""
    chain = TierChain(tiers, reactor.post)
    return LowerTiers(
        chain=chain,
        promotions=Promotions(chain, reactor, max_loads),
        demotions=Demotions(chain, reactor, clock, max_stores, num_remembered),
        reactor=reactor,
        deadline_s=deadline_s,
        upkeep=tuple(upkeep),
        check_payload=check_payload,
    )
