"""Only layouts whose bytes can be taken as they are pair up."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shared.kv_cache.convert import can_convert
from shared.types.identity import LayoutSpec
from tests.unit.kv_cache.kv_builders import NARROW, WIDE

LAYOUT = LayoutSpec(groups=(NARROW, WIDE), block_size=16, wire_versions=(2, 4))


def test_equal_layouts_convert() -> None:
    assert can_convert(LAYOUT, msgspec.structs.replace(LAYOUT))


@pytest.mark.parametrize("versions", [(1, 2), (4, 9), (3, 3), (1, 9)])
def test_overlapping_wire_versions_suffice(versions: tuple[int, int]) -> None:
    other = msgspec.structs.replace(LAYOUT, wire_versions=versions)
    assert can_convert(LAYOUT, other) and can_convert(other, LAYOUT)


@pytest.mark.parametrize(
    "change",
    [
        {"groups": (NARROW,)},
        {"groups": (WIDE, NARROW)},
        *(
            {"groups": (msgspec.structs.replace(NARROW, **change), WIDE)}
            for change in (
                {"num_layers": 2},
                {"num_kv_heads": 2},
                {"head_dim": 4},
                {"dtype": "float16"},
                {"window": 8},
            )
        ),
        {"block_size": 32},
        {"tp_size": 2},
        {"head_start": 1},
        {"extent_order": "layer,kv,token,kv_head,dim"},
        {"checksum": "crc32"},
        {"wire_versions": (1, 1)},
        {"wire_versions": (5, 6)},
    ],
)
def test_any_other_difference_keeps_them_apart(change: dict[str, Any]) -> None:
    other = msgspec.structs.replace(LAYOUT, **change)
    assert not can_convert(LAYOUT, other)
    assert not can_convert(other, LAYOUT)


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
