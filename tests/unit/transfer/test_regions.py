"""Bounds and joining of reads: pure functions that every backend trusts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import TransferError
from shared.transfer.base import ReadOp
from shared.transfer.regions import check_ops, coalesce

SIZE = 64
OPS = st.builds(ReadOp, st.integers(0, SIZE - 8), st.integers(0, SIZE - 8), st.integers(1, 8))


def copied(ops: list[ReadOp]) -> list[tuple[int, int]]:
    """Every (source byte, destination byte) that the ops name, in order."""
    return [(op.remote_offset + i, op.local_offset + i) for op in ops for i in range(op.nbytes)]


@given(st.lists(OPS, max_size=12))
def test_joining_changes_no_byte(ops: list[ReadOp]) -> None:
    joined = coalesce(ops)
    assert copied(joined) == copied(ops)
    assert len(joined) <= len(ops)


def test_consecutive_blocks_become_one_copy() -> None:
    assert coalesce([ReadOp(8 * i, 80 + 8 * i, 8) for i in range(5)]) == [ReadOp(0, 80, 40)]


@given(st.integers(-4, SIZE + 4), st.integers(-4, SIZE + 4), st.integers(-4, SIZE + 4))
def test_bounds_are_those_of_both_regions(remote: int, local: int, nbytes: int) -> None:
    inside = nbytes > 0 and all(at >= 0 and at + nbytes <= SIZE for at in (remote, local))
    if inside:
        check_ops([ReadOp(remote, local, nbytes)], SIZE, SIZE)
    else:
        with pytest.raises(TransferError):
            check_ops([ReadOp(remote, local, nbytes)], SIZE, SIZE)
