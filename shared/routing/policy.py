"""Picks encoders, prefill and decode of one request at once, from one snapshot of the live workers.

Owns the arithmetic of choosing; pure functions, so that a simulator can run them too. Owns no
connection, no clock and no memory of earlier choices (see ``affinity``).

All costs are in tokens of prefill work: a request in front of ours is taken as so many tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from shared.kv_cache.convert import can_convert
from shared.types.identity import IdentityKey, LayoutSpec
from shared.types.worker import AGGREGATED, PREFILL

#: What a request that is already on a worker counts for.
PREFILL_LOAD_TOKENS = 256.0
DECODE_LOAD_TOKENS = 64.0
#: What a full KV pool counts for; in between it grows in proportion.
KV_PRESSURE_TOKENS = 1024.0
#: Added when the prompt does not fit into the blocks that are free now.
NO_ROOM_TOKENS = 65536.0
#: Added for a worker at which this request failed before: taken only when nothing else is left.
AVOIDED_TOKENS = 1e9


class WorkerView(Struct, frozen=True):
    """One live worker as the policy sees it. ``key`` names one incarnation.

    ``num_requests`` is the larger of what the worker reported and what the router sent it.
    """

    key: str
    kind: str
    model: str
    identity: IdentityKey
    layout: LayoutSpec | None = None
    block_size: int = 0
    num_requests: int = 0
    num_blocks: int = 0
    num_blocks_free: int = 0


class MediaDemand(Struct, frozen=True):
    """One distinct media item; ``holder`` is the key of the encoder believed to hold it, or ""."""

    mm_hash: str
    num_tokens: int
    holder: str = ""


class Demand(Struct, frozen=True):
    """What one request needs. ``cached`` = tokens of its prefix believed to be on a worker, by key."""

    model: str
    num_tokens: int
    media: tuple[MediaDemand, ...] = ()
    cached: Mapping[str, int] = {}
    avoid: frozenset[str] = frozenset()


class PolicyOptions(Struct, frozen=True):
    """``short_prompt_tokens``: a prompt with fewer uncached tokens is served by one decode worker
    alone. 0 = always apart when both phases are there."""

    short_prompt_tokens: int = 0


class Placement(Struct, frozen=True):
    """The workers of one attempt, by key. ``prefill`` is "" in aggregated mode, in which the worker
    named by ``decode`` does everything after encoding."""

    mode: str
    decode: str
    prefill: str = ""
    encoders: tuple[tuple[str, tuple[str, ...]], ...] = ()


def place(
    workers: Sequence[WorkerView], demand: Demand, options: PolicyOptions | None = None
) -> Placement | None:
    """The cheapest placement, or None when the live workers cannot serve the request now.

    Equal costs are decided by the order of the keys, so equal snapshots give equal answers.
    """
    options = options or PolicyOptions()
    serving = [w for w in workers if w.model == demand.model]
    prefills = sorted((w for w in serving if w.kind == "prefill" and w.layout), key=lambda w: w.key)
    decodes = sorted((w for w in serving if w.kind == "decode" and w.layout), key=lambda w: w.key)
    chosen = _pair(prefills, decodes, demand)
    if chosen is None or _is_short(chosen, demand, options):
        chosen = _alone(decodes, demand) or _alone(prefills, demand)
    if chosen is None:
        return None
    identity = next(w.identity for w in serving if w.key == chosen.decode)
    encoders = _encoders([w for w in serving if w.kind == "encoder"], identity, demand)
    if encoders is None:
        return None
    return Placement(chosen.mode, chosen.decode, chosen.prefill, encoders)


def can_pair(a: WorkerView, b: WorkerView) -> bool:
    """Whether KV of ``a`` means the same on ``b`` and can be laid out there."""
    return (
        a.layout is not None
        and b.layout is not None
        and a.identity == b.identity
        and can_convert(a.layout, b.layout)
    )


def _pair(prefills: Sequence[WorkerView], decodes: Sequence[WorkerView], demand: Demand) -> Placement | None:
    best: Placement | None = None
    best_cost = float("inf")
    decode_costs = [_decode_cost(d, demand) for d in decodes]
    for prefill in prefills:
        prefill_cost = _prefill_cost(prefill, demand)
        for decode, decode_cost in zip(decodes, decode_costs, strict=True):
            cost = prefill_cost + decode_cost
            if cost < best_cost and can_pair(prefill, decode):
                best, best_cost = Placement(PREFILL, decode.key, prefill.key), cost
    return best


def _alone(workers: Sequence[WorkerView], demand: Demand) -> Placement | None:
    if not workers:
        return None
    costs = [(_prefill_cost(w, demand) + _decode_cost(w, demand), w.key) for w in workers]
    return Placement(AGGREGATED, min(costs)[1])


def _is_short(chosen: Placement, demand: Demand, options: PolicyOptions) -> bool:
    uncached = demand.num_tokens - demand.cached.get(chosen.prefill, 0)
    return uncached < options.short_prompt_tokens


def _prefill_cost(worker: WorkerView, demand: Demand) -> float:
    uncached = demand.num_tokens - demand.cached.get(worker.key, 0)
    return uncached + worker.num_requests * PREFILL_LOAD_TOKENS + _avoided(worker, demand)


def _decode_cost(worker: WorkerView, demand: Demand) -> float:
    cost = worker.num_requests * DECODE_LOAD_TOKENS + _avoided(worker, demand)
    if worker.num_blocks:
        cost += KV_PRESSURE_TOKENS * (1 - worker.num_blocks_free / worker.num_blocks)
        if worker.num_blocks_free * worker.block_size < demand.num_tokens:
            cost += NO_ROOM_TOKENS
    return cost


def _avoided(worker: WorkerView, demand: Demand) -> float:
    return AVOIDED_TOKENS if worker.key in demand.avoid else 0.0


def _encoders(
    encoders: Sequence[WorkerView], identity: IdentityKey, demand: Demand
) -> tuple[tuple[str, tuple[str, ...]], ...] | None:
    """Each item to its holder, else to the encoder with the least work (what this request adds
    counts too, so that many items spread); grouped by encoder. None when there is no encoder."""
    usable = [
        w for w in encoders if (w.identity.model, w.identity.revision) == (identity.model, identity.revision)
    ]
    if demand.media and not usable:
        return None
    work = {w.key: w.num_requests + _avoided(w, demand) for w in usable}
    groups: dict[str, list[str]] = {}
    for item in demand.media:
        held = item.holder in work and item.holder not in demand.avoid
        key = item.holder if held else min(work, key=lambda k: (work[k], k))
        if not held:
            work[key] += 1
        groups.setdefault(key, []).append(item.mm_hash)
    return tuple((key, tuple(hashes)) for key, hashes in groups.items())
