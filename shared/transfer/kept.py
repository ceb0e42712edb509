"""An arena that a keeper holds for its owner: claimed at the start, made anew when there is none."""

from __future__ import annotations

import hashlib

import msgspec

from shared.errors import ConfigError
from shared.telemetry.logs import get_logger
from shared.transfer.arena import Arena, plan_region
from shared.transfer.keeper import KeptClaim, NoKeeper
from shared.types.identity import IdentityKey, LayoutSpec

_log = get_logger(__name__)

#: Raised whenever what stands in arena or ledger changes its meaning.
_FORMAT = 1


class KeptArena:
    """``arena`` to work with; ``old``: it holds what an earlier life left in it. ``close`` gives the claim
    up, not the arena."""

    def __init__(self, arena: Arena, old: bool, claim: KeptClaim | None) -> None:
        self.arena = arena
        self.old = old
        self._claim = claim

    def close(self) -> None:
        """Twice is safe."""
        if self._claim is not None:
            self._claim.close()


def open_kept(
    address: str,
    owner: str,
    identity: IdentityKey,
    layout: LayoutSpec,
    name: str,
    num_blocks: tuple[int, ...],
    extent_bytes: tuple[int, ...],
    incarnation: str,
    ledger_bytes: int,
) -> KeptArena:
    """The arena ``name`` of ``owner``: the kept one if its contents mean the same here, else a new one, given
    to the keeper at ``address``. Without a keeper that answers: one that ends with us. Raises as Arena."""
    plan = plan_region(name, num_blocks, extent_bytes, ledger_bytes)
    parts = msgspec.json.encode([_FORMAT, identity, layout, plan])
    claim: KeptClaim | None = None
    try:
        claim = KeptClaim(address, f"{owner}/{name}", hashlib.sha256(parts).digest())
        if claim.fd is not None:
            return KeptArena(Arena.adopt(claim.fd, plan, incarnation), True, claim)
    except (NoKeeper, ConfigError) as error:
        _log.warning("no kept arena", owner=owner, problem=str(error))
    arena = Arena.create(name, num_blocks, extent_bytes, incarnation, ledger_bytes=ledger_bytes)
    if claim is not None:
        try:
            claim.deposit(arena.fd)
        except NoKeeper as error:
            _log.warning("the arena will not be kept", owner=owner, problem=str(error))
    return KeptArena(arena, False, claim)
