"""Choosing E, P and D from a snapshot."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from shared.routing.policy import (
    AVOIDED_TOKENS,
    Demand,
    MediaDemand,
    Placement,
    WorkerView,
    can_pair,
    place,
)
from shared.types.identity import IdentityKey, LayoutSpec
from shared.types.kv import KVGroupSpec
from shared.types.worker import AGGREGATED, PREFILL

IDENTITY = IdentityKey("m", "r", "t", "float32")
LAYOUT = LayoutSpec((KVGroupSpec(2, 2, 4, "float32"),), 16)


def view(key: str, **changes: Any) -> WorkerView:
    kind = {"e": "encoder", "p": "prefill", "d": "decode"}[key[0]]
    layout = None if kind == "encoder" else LAYOUT
    worker = WorkerView(key, kind, "m", IDENTITY, layout, 16, 0, 100, 100)
    return structs.replace(worker, **changes)


def placed(views: list[WorkerView], demand: Demand) -> Placement | None:
    """The workers of the placement, without the figures."""
    p = place(views, demand)
    return None if p is None else Placement(p.mode, p.decode, p.prefill, p.encoders)


def test_a_pair_is_chosen_at_once() -> None:
    assert placed([view("d0"), view("p0")], Demand("m", 10)) == Placement(PREFILL, "d0", "p0")


def test_equal_costs_are_decided_by_key_whatever_the_order() -> None:
    views = [view(key) for key in ("d1", "p1", "d0", "p0", "e1", "e0")]
    demand = Demand("m", 10, (MediaDemand("h", 4),))
    expected = Placement(PREFILL, "d0", "p0", (("e0", ("h",)),))
    assert placed(views, demand) == placed(views[::-1], demand) == expected


def test_only_equal_identities_and_convertible_layouts_are_paired() -> None:
    other = structs.replace(IDENTITY, numerics="int8")
    wide = structs.replace(LAYOUT, block_size=24)
    assert can_pair(view("p0"), view("d0"))
    assert not can_pair(view("p0", identity=other), view("d0"))
    assert not can_pair(view("p0", layout=wide), view("d0"))
    assert not can_pair(view("p0", layout=None), view("d0"))
    views = [view("p0", identity=other), view("p1", num_requests=50), view("d0", layout=wide), view("d1")]
    assert placed(views, Demand("m", 10)) == Placement(PREFILL, "d1", "p1")


def test_strangers_serve_alone() -> None:
    """A roll from one layout to the next: no pair is left, yet nothing is refused."""
    wide = structs.replace(LAYOUT, block_size=24)
    assert placed([view("p0"), view("d0", layout=wide)], Demand("m", 10)) == Placement(AGGREGATED, "d0")


@pytest.mark.parametrize(("present", "alone"), [(["d0"], "d0"), (["p0"], "p0"), (["d0", "d1"], "d0")])
def test_a_missing_phase_means_aggregated(present: list[str], alone: str) -> None:
    assert placed([view(key) for key in present], Demand("m", 10)) == Placement(AGGREGATED, alone)


def test_nobody_is_nobody() -> None:
    assert placed([], Demand("m", 10)) is None
    assert placed([view("e0")], Demand("m", 10)) is None
    assert placed([view("p0"), view("d0")], Demand("other", 10)) is None
    assert placed([view("p0"), view("d0")], Demand("m", 10, (MediaDemand("h", 4),))) is None


def test_a_known_prefix_outweighs_a_little_load_and_no_more() -> None:
    def chosen(load: int) -> str:
        views = [view("p0", num_requests=load), view("p1"), view("d0")]
        placement = place(views, Demand("m", 1000, cached={"p0": 960}))
        assert placement is not None
        return placement.prefill

    assert [chosen(load) for load in (0, 3, 4)] == ["p0", "p0", "p1"]


def test_load_and_full_memory_turn_requests_away() -> None:
    demand = Demand("m", 64)
    views = [view("p0", num_requests=1), view("p1"), view("d0", num_requests=1), view("d1")]
    assert placed(views, demand) == Placement(PREFILL, "d1", "p1")
    views = [view("p0"), view("d0", num_blocks_free=3), view("d1", num_blocks_free=30, num_requests=20)]
    assert placed(views, demand) == Placement(PREFILL, "d1", "p0")


def test_workers_to_avoid_are_a_last_resort() -> None:
    demand = Demand("m", 10, (MediaDemand("h", 4, holder="e0"),), avoid=frozenset({"p0", "d0", "e0"}))
    assert placed([view("p0"), view("d0"), view("e0")], demand) is not None
    views = [view(k) for k in ("p0", "d0", "e0")] + [
        view("p1", num_requests=99),
        view("d1", num_requests=99),
        view("e1", num_requests=99),
    ]
    assert placed(views, demand) == Placement(PREFILL, "d1", "p1", (("e1", ("h",)),))
    assert AVOIDED_TOKENS > 1e6


def test_media_go_to_their_holder_and_spread_otherwise() -> None:
    media = tuple(MediaDemand(h, 4, holder) for h, holder in [("a", "e1"), ("b", ""), ("c", ""), ("d", "e9")])
    placement = place([view("p0"), view("d0"), view("e0"), view("e1")], Demand("m", 10, media))
    assert placement is not None
    assert placement.encoders == (("e1", ("a", "c")), ("e0", ("b", "d")))


def test_encoders_of_another_revision_are_not_asked() -> None:
    other = structs.replace(IDENTITY, revision="old")
    demand = Demand("m", 10, (MediaDemand("h", 4),))
    assert placed([view("p0"), view("d0"), view("e0", identity=other)], demand) is None


class Known:
    """Costs as a test says them."""

    def __init__(self, apart: float | None, alone: float | None) -> None:
        self.costs = apart, alone
        self.asked: list[tuple[float, ...]] = []

    def apart(self, prefill: str, decode: str, work: float, moved: float) -> float | None:
        self.asked.append((work, moved))
        return self.costs[0]

    def alone(self, worker: str, work: float, num_streams: int) -> tuple[float, float] | None:
        self.asked.append((work, float(num_streams)))
        return None if self.costs[1] is None else (self.costs[1] - 0.5, 0.5)


@pytest.mark.parametrize(
    ("apart", "alone", "mode"),
    [
        (2.0, 1.0, AGGREGATED),
        (1.0, 2.0, PREFILL),
        (1.0, 1.0, PREFILL),
        (None, 1.0, PREFILL),
        (1.0, None, PREFILL),
        (None, None, PREFILL),
    ],
)
def test_the_cheaper_way_is_taken_and_apart_when_in_doubt(
    apart: float | None, alone: float | None, mode: str
) -> None:
    placement = place([view("p0"), view("d0")], Demand("m", 31), Known(apart, alone))
    assert placement is not None and placement.mode == mode
    if mode == PREFILL:
        assert placement.predicted_s == apart
    else:
        assert alone is not None and (placement.predicted_s, placement.delay_s) == (alone - 0.5, 0.5)


def test_costs_are_asked_for_what_is_left_to_do() -> None:
    costs = Known(None, None)
    views = [view("p0", num_requests=2), view("d0", num_requests=3)]
    place(views, Demand("m", 100, cached={"p0": 64, "d0": 32}), costs)
    assert costs.asked == [(36 + 2 * 256, 68), (68, 3)]


keys = st.lists(st.sampled_from(["p0", "p1", "p2", "d0", "d1", "d2", "e0", "e1"]), unique=True)


@settings(max_examples=200, deadline=None)
@given(
    keys=keys,
    loads=st.lists(st.integers(0, 20), min_size=8, max_size=8),
    odd=st.sets(st.sampled_from(["p0", "p1", "d0", "d1"])),
    items=st.integers(0, 3),
)
def test_every_placement_is_whole_and_pairable(
    keys: list[str], loads: list[int], odd: set[str], items: int
) -> None:
    other = structs.replace(IDENTITY, kv_dtype="bfloat16")
    views = [
        view(key, num_requests=load, identity=other if key in odd else IDENTITY)
        for key, load in zip(keys, loads, strict=False)
    ]
    by_key = {v.key: v for v in views}
    demand = Demand("m", 40, tuple(MediaDemand(f"h{i}", 4) for i in range(items)))
    placement = place(views, demand)
    assert placement == place(views[::-1], demand)
    serving = [v for v in views if v.kind != "encoder"]
    if placement is None:
        assert not serving or (items and not [v for v in views if v.kind == "encoder"])
        return
    if placement.mode == PREFILL:
        assert can_pair(by_key[placement.prefill], by_key[placement.decode])
        assert by_key[placement.prefill].kind == "prefill" and by_key[placement.decode].kind == "decode"
    else:
        assert not any(
            can_pair(p, d) for p in serving for d in serving if (p.kind, d.kind) == ("prefill", "decode")
        )
    hashes = [h for key, group in placement.encoders for h in group if by_key[key].kind == "encoder"]
    assert sorted(hashes) == [item.mm_hash for item in demand.media]
