"""Paged attention and rotary store: compiled against the torch twin, the twin against plain float64."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.attention import attention, attention_twin, rotary_store, rotary_store_twin
from shared.kernels.library import available
from tests.unit.kernels.geometry import Case, make_case, part_of, slice_batch

pytestmark = pytest.mark.skipif(not available(), reason="no C compiler")

MIXED = [(0, 5), (37, 1), (8, 9), (63, 1), (0, 1), (16, 30)]
GEOMETRIES = [
    {"heads": (9, 3, 64), "block_size": 16},
    {"heads": (4, 4, 16), "block_size": 4},
    {"heads": (8, 2, 48), "block_size": 32},
    {"heads": (5, 1, 80), "block_size": 8},
    {"heads": (7, 1, 128), "block_size": 16},
    {"heads": (6, 2, 32), "block_size": 8, "window": 11},
    {"heads": (6, 3, 64), "block_size": 4, "window": 1},
]


def _plain(case: Case, layer: int) -> torch.Tensor:
    """Attention token by token in float64, from the formula."""
    heads, batch, kv = case.heads, case.batch, case.kv
    group = heads.num_heads // heads.num_kv_heads
    out = torch.empty(batch.num_tokens, heads.num_heads, heads.dim, dtype=torch.float64)
    for t in range(batch.num_tokens):
        row, position = int(batch.rows_T[t]), int(batch.positions_T[t])
        first = 0 if kv.window is None else max(0, position - kv.window + 1)
        slots = [
            (int(kv.tables_RM[row, p // kv.block_size]), p % kv.block_size)
            for p in range(first, position + 1)
        ]
        for h in range(heads.num_heads):
            k, v = (
                torch.stack([kv.data_BKL2SD[b, h // group, layer, which, s] for b, s in slots]).double()
                for which in (0, 1)
            )
            q = case.qkv[t, h * heads.dim : (h + 1) * heads.dim].double()
            out[t, h] = torch.softmax(k @ q, 0) @ v
    return out.flatten(1)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_attention_equals_its_twin_and_float64(geometry: dict) -> None:
    case = make_case(1, MIXED, **geometry)
    rotary_store(case.qkv, case.heads, case.batch, case.kv, 1)
    exact = _plain(case, 1)
    native = attention(case.qkv, case.heads, case.batch, case.kv, 1)
    twin = attention_twin(case.qkv, case.heads, case.batch, case.kv, 1)
    torch.testing.assert_close(native.double(), exact, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(twin.double(), exact, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_rotary_store_equals_its_twin(geometry: dict, norm: bool) -> None:
    case = make_case(2, MIXED, **geometry)
    other = case.copy()
    norms = [torch.rand(case.heads.dim) + 0.5 for _ in range(2)] if norm else [None, None]
    rotary_store(case.qkv, case.heads, case.batch, case.kv, 0, *norms)
    rotary_store_twin(other.qkv, other.heads, other.batch, other.kv, 0, *norms)
    torch.testing.assert_close(case.qkv, other.qkv, rtol=1e-5, atol=1e-6)
    # NaN where nothing was written: slots that nobody owns must stay untouched.
    torch.testing.assert_close(
        case.kv.data_BKL2SD, other.kv.data_BKL2SD, rtol=1e-5, atol=1e-6, equal_nan=True
    )


def test_a_token_does_not_depend_on_its_batch_or_chunk() -> None:
    case = make_case(3, MIXED, heads=(9, 3, 64), block_size=16)
    rotary_store(case.qkv, case.heads, case.batch, case.kv, 0)
    together = attention(case.qkv, case.heads, case.batch, case.kv, 0)
    for index in range(len(MIXED)):
        first, last = case.batch.starts[index : index + 2]
        alone = attention(case.qkv[first:last].contiguous(), case.heads, part_of(case, index), case.kv, 0)
        assert torch.equal(alone, together[first:last])
    start, end = case.batch.starts[-2:]
    for first, last in ((start, start + 1), (start + 1, start + 8), (start + 8, end)):
        chunk = slice_batch(case.batch, first, last)
        part = attention(case.qkv[first:last].contiguous(), case.heads, chunk, case.kv, 0)
        assert torch.equal(part, together[first:last])


def test_a_window_reads_nothing_before_it() -> None:
    case = make_case(4, [(50, 3)], window=5, block_size=8)
    rotary_store(case.qkv, case.heads, case.batch, case.kv, 0)
    before = attention(case.qkv, case.heads, case.batch, case.kv, 0)
    for position in range(46):
        block = int(case.kv.tables_RM[0, position // 8])
        case.kv.data_BKL2SD[block, :, :, :, position % 8] = float("nan")
    case.kv.tables_RM[0, :5] = 0
    assert torch.equal(before, attention(case.qkv, case.heads, case.batch, case.kv, 0))
    twin = attention_twin(case.qkv, case.heads, case.batch, case.kv, 0)
    torch.testing.assert_close(before, twin, rtol=1e-5, atol=1e-6)


def test_a_poisoned_context_shows() -> None:
    """The poison of the other tests would be seen if it were read."""
    case = make_case(5, [(20, 1)])
    rotary_store(case.qkv, case.heads, case.batch, case.kv, 0)
    case.kv.data_BKL2SD[int(case.kv.tables_RM[0, 0]), :, 0, 1, 0] = float("nan")
    assert attention(case.qkv, case.heads, case.batch, case.kv, 0).isnan().all()


def test_a_long_context_with_large_scores_stays_exact() -> None:
    case = make_case(6, [(2000, 2)], heads=(3, 1, 64), block_size=16, num_layers=1)
    case.qkv *= 20
    rotary_store(case.qkv, case.heads, case.batch, case.kv, 0)
    native = attention(case.qkv, case.heads, case.batch, case.kv, 0)
    torch.testing.assert_close(native.double(), _plain(case, 0), rtol=1e-4, atol=1e-5)
