"""Picks encoders, prefill and decode of one request at once, from one snapshot of the live workers.

Owns the arithmetic of choosing; pure functions, so that a simulator can run them too. Owns no
connection, no clock and no memory of earlier choices (see ``affinity``).

Which worker of a kind is best is counted in tokens of prefill work: a request in front of ours is taken as
so many tokens. Whether the phases run apart or on one worker is decided by measured seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct, structs

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


class Costs(Protocol):
    """Seconds until a request is rolling; None where nothing is known (``shared.routing.cost``)."""

    def apart(self, prefill: str, decode: str, work: float, moved: float) -> float | None: ...

    def alone(self, worker: str, work: float, num_streams: int) -> tuple[float, float] | None:
        """And beside them the seconds for which the worker's streams are held up together."""
        ...


class AlwaysApart:
    """Nothing is known, so that the phases are kept apart wherever both are there."""

    def apart(self, prefill: str, decode: str, work: float, moved: float) -> float | None:
        return None

    def alone(self, worker: str, work: float, num_streams: int) -> tuple[float, float] | None:
        return None


class Placement(Struct, frozen=True):
    """The workers of one attempt, by key. ``prefill`` is "" in aggregated mode, in which the worker
    named by ``decode`` does everything after encoding.

    What the choice went by: ``work`` = tokens to compute, those ahead in the queue included; ``moved`` =
    tokens to be handed over; ``predicted_s`` = seconds until the request is rolling, None: not known;
    ``delay_s`` = seconds for which others are held up by it.
    """

    mode: str
    decode: str
    prefill: str = ""
    encoders: tuple[tuple[str, tuple[str, ...]], ...] = ()
    work: float = 0.0
    moved: float = 0.0
    predicted_s: float | None = None
    delay_s: float = 0.0


def place(workers: Sequence[WorkerView], demand: Demand, costs: Costs | None = None) -> Placement | None:
    """The cheapest placement, or None when the live workers cannot serve the request now.

    Which workers: by load and cache, equal ones by the order of the keys, so that equal snapshots give
    equal answers. Whether apart or alone: by ``costs``; apart when they do not know better.
    """
    costs = costs or AlwaysApart()
    serving = [w for w in workers if w.model == demand.model]
    prefills = sorted((w for w in serving if w.kind == "prefill" and w.layout), key=lambda w: w.key)
    decodes = sorted((w for w in serving if w.kind == "decode" and w.layout), key=lambda w: w.key)
    pair = _pair(prefills, decodes, demand, costs)
    alone = _alone(decodes, demand, costs) or _alone(prefills, demand, costs)
    chosen = _cheaper(pair, alone)
    if chosen is None:
        return None
    identity = next(w.identity for w in serving if w.key == chosen.decode)
    encoders = _encoders([w for w in serving if w.kind == "encoder"], identity, demand)
    if encoders is None:
        return None
    return structs.replace(chosen, encoders=encoders)


def can_pair(a: WorkerView, b: WorkerView) -> bool:
    """Whether KV of ``a`` means the same on ``b`` and can be laid out there."""
    return (
        a.layout is not None
        and b.layout is not None
        and a.identity == b.identity
        and can_convert(a.layout, b.layout)
    )


def _cheaper(pair: Placement | None, alone: Placement | None) -> Placement | None:
    if pair is None or alone is None:
        return pair or alone
    if pair.predicted_s is None or alone.predicted_s is None:
        return pair
    return alone if alone.predicted_s + alone.delay_s < pair.predicted_s + pair.delay_s else pair


def _pair(
    prefills: Sequence[WorkerView], decodes: Sequence[WorkerView], demand: Demand, costs: Costs
) -> Placement | None:
    best: tuple[WorkerView, WorkerView] | None = None
    best_cost = float("inf")
    decode_costs = [_decode_cost(d, demand) for d in decodes]
    for prefill in prefills:
        prefill_cost = _prefill_cost(prefill, demand)
        for decode, decode_cost in zip(decodes, decode_costs, strict=True):
            cost = prefill_cost + decode_cost
            if cost < best_cost and can_pair(prefill, decode):
                best, best_cost = (prefill, decode), cost
    if best is None:
        return None
    prefill, decode = best
    work = _uncached(prefill, demand) + prefill.num_requests * PREFILL_LOAD_TOKENS
    moved = float(_uncached(decode, demand))
    predicted = costs.apart(prefill.key, decode.key, work, moved)
    return Placement(PREFILL, decode.key, prefill.key, (), work, moved, predicted)


def _alone(workers: Sequence[WorkerView], demand: Demand, costs: Costs) -> Placement | None:
    if not workers:
        return None
    worker = min(workers, key=lambda w: (_prefill_cost(w, demand) + _decode_cost(w, demand), w.key))
    work = float(_uncached(worker, demand))
    predicted, delay = costs.alone(worker.key, work, worker.num_requests) or (None, 0.0)
    return Placement(AGGREGATED, worker.key, "", (), work, 0.0, predicted, delay)


def _uncached(worker: WorkerView, demand: Demand) -> int:
    return max(1, demand.num_tokens - demand.cached.get(worker.key, 0))


def _prefill_cost(worker: WorkerView, demand: Demand) -> float:
    load = worker.num_requests * PREFILL_LOAD_TOKENS
    return _uncached(worker, demand) + load + _avoided(worker, demand)


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
