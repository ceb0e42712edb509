"""Only layouts whose bytes can be cut into each other pair up."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.kv_cache.convert import MAX_BLOCK_SIZE, can_convert
from shared.types.identity import LayoutSpec
from shared.types.kv import KVGroupSpec
from tests.unit.kv_cache.kv_builders import NARROW, WIDE

NARROW_OF_FOUR, WIDE_OF_EIGHT = (
    msgspec.structs.replace(group, num_kv_heads=heads) for group, heads in ((NARROW, 4), (WIDE, 8))
)
LAYOUT = LayoutSpec(groups=(NARROW_OF_FOUR, WIDE_OF_EIGHT), block_size=16, wire_versions=(2, 4))


def changed(**fields: Any) -> LayoutSpec:
    return msgspec.structs.replace(LAYOUT, **fields)


def test_equal_layouts_convert() -> None:
    assert can_convert(LAYOUT, changed())


@pytest.mark.parametrize("versions", [(1, 2), (4, 9), (3, 3), (1, 9)])
def test_overlapping_wire_versions_suffice(versions: tuple[int, int]) -> None:
    other = changed(wire_versions=versions)
    assert can_convert(LAYOUT, other) and can_convert(other, LAYOUT)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("block_size", [1, 2, 8, 16, 32, 48, MAX_BLOCK_SIZE])
def test_other_ranks_and_multiples_of_blocks_convert(tp_size: int, block_size: int) -> None:
    other = changed(tp_size=tp_size, block_size=block_size)
    assert can_convert(LAYOUT, other) and can_convert(other, LAYOUT)
    assert can_convert(other, other)


@pytest.mark.parametrize(
    "change",
    [
        {"groups": (NARROW_OF_FOUR,)},
        {"groups": (WIDE_OF_EIGHT, NARROW_OF_FOUR)},
        *(
            {"groups": (msgspec.structs.replace(NARROW_OF_FOUR, **change), WIDE_OF_EIGHT)}
            for change in (
                {"num_layers": 2},
                {"num_kv_heads": 2},
                {"head_dim": 4},
                {"dtype": "float16"},
                {"window": 8},
            )
        ),
        {"block_size": 24},
        {"block_size": 0},
        {"block_size": -16},
        {"block_size": 2 * MAX_BLOCK_SIZE},
        {"tp_size": 3},
        {"tp_size": 8},
        {"tp_size": 0},
        {"tp_size": -1},
        {"head_start": 1},
        {"extent_order": "layer,kv,token,kv_head,dim"},
        {"checksum": "crc32"},
        {"wire_versions": (1, 1)},
        {"wire_versions": (5, 6)},
    ],
)
def test_any_other_difference_keeps_them_apart(change: dict[str, Any]) -> None:
    other = changed(**change)
    assert not can_convert(LAYOUT, other)
    assert not can_convert(other, LAYOUT)


def test_ranks_that_do_not_share_the_heads_equally_pair_with_nobody() -> None:
    odd = changed(tp_size=3)
    assert not can_convert(odd, odd)


LAYOUTS = st.builds(
    LayoutSpec,
    groups=st.lists(
        st.builds(
            KVGroupSpec,
            st.just(1),
            st.sampled_from([1, 2, 4, 6]),
            st.just(2),
            st.sampled_from(["float16", "float32"]),
        ),
        min_size=1,
        max_size=2,
    ).map(tuple),
    block_size=st.sampled_from([0, 1, 3, 16, 24, 32, 2048]),
    tp_size=st.integers(-1, 6),
    head_start=st.sampled_from([0, 0, 0, 1]),
    extent_order=st.sampled_from(["a", "a", "a", "b"]),
    checksum=st.sampled_from(["x", "x", "x", "y"]),
    wire_versions=st.sampled_from([(1, 1), (1, 2), (2, 3)]),
)


@given(a=LAYOUTS, b=LAYOUTS)
def test_the_rule_is_symmetric_and_what_converts_shares_its_bytes(a: LayoutSpec, b: LayoutSpec) -> None:
    assert can_convert(a, b) == can_convert(b, a)
    if can_convert(a, b):
        assert (a.groups, a.extent_order, a.checksum) == (b.groups, b.extent_order, b.checksum)
        for group in a.groups:
            assert group.num_kv_heads % a.tp_size == group.num_kv_heads % b.tp_size == 0
        assert a.block_size == b.block_size or 0 in (a.block_size % b.block_size, b.block_size % a.block_size)


def test_every_field_of_the_layout_is_judged() -> None:
    # A field that is added to LayoutSpec must get its place in can_convert and here.
    assert set(LayoutSpec.__struct_fields__) == {
        "groups",
        "block_size",
        "tp_size",
        "head_start",
        "extent_order",
        "checksum",
        "wire_versions",
    }
