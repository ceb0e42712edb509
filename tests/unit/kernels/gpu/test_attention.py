"""Paged attention and the rotary store of a GPU against their torch twins."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.attention import attention_twin, rotary_store_twin
from shared.kernels.batch import Batch, PagedKV
from shared.kernels.gpu.attention import (
    attention,
    attention_fresh,
    fresh_spans,
    query_tiles,
    rotary_store,
    tokens_of_a_tile,
)
from tests.unit.kernels.geometry import Case, make_case, slice_batch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MIXED = [(0, 5), (37, 1), (63, 1), (16, 30)]
GEOMETRIES = [
    {"heads": (9, 3, 64), "block_size": 16},
    {"heads": (8, 2, 48), "block_size": 32},
    {"heads": (7, 1, 128), "block_size": 16},
    {"heads": (6, 2, 32), "block_size": 8, "window": 11},
]


def placed(case: Case, dtype: torch.dtype = torch.float32) -> Case:
    """The case on the device that is here, in ``dtype``."""
    batch = case.batch
    moved = Batch(
        batch.rows_T.to(DEVICE),
        batch.positions_T.to(DEVICE),
        batch.starts,
        batch.cos_TD.to(DEVICE),
        batch.sin_TD.to(DEVICE),
    )
    kv = PagedKV(case.kv.data_BKL2SD.to(DEVICE, dtype), case.kv.tables_RM.to(DEVICE), case.kv.window)
    return Case(case.heads, moved, kv, case.qkv.to(DEVICE, dtype))


def stored(case: Case, *, norm: bool = False) -> Case:
    """Rotated and written by the twin."""
    norms = [torch.rand(case.heads.dim) + 0.5 for _ in range(2)] if norm else [None, None]
    rotary_store_twin(case.qkv, case.heads, case.batch, case.kv, 1, *norms)
    return case


def attend(
    case: Case, batch: Batch | None = None, qkv: torch.Tensor | None = None, **options: float
) -> torch.Tensor:
    batch = case.batch if batch is None else batch
    tiles = torch.from_numpy(query_tiles(batch.starts, case.heads)).to(DEVICE)
    return attention(case.qkv if qkv is None else qkv, case.heads, batch, case.kv, 1, tiles, **options)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_rotary_store_equals_its_twin(geometry: dict, norm: bool) -> None:
    case = make_case(2, MIXED, **geometry)
    ours = placed(case.copy())
    norms = [torch.rand(case.heads.dim) + 0.5 for _ in range(2)] if norm else [None, None]
    rotary_store_twin(case.qkv, case.heads, case.batch, case.kv, 1, *norms)
    on_device = [None if x is None else x.to(DEVICE) for x in norms]
    rotary_store(ours.qkv, ours.heads, ours.batch, ours.kv, 1, *on_device)
    torch.testing.assert_close(ours.qkv.cpu(), case.qkv, rtol=2e-6, atol=2e-6)
    written = ours.kv.data_BKL2SD.cpu()
    torch.testing.assert_close(written, case.kv.data_BKL2SD, rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_attention_equals_its_twin(geometry: dict) -> None:
    case = stored(make_case(1, MIXED, **geometry))
    twin = attention_twin(case.qkv, case.heads, case.batch, case.kv, 1)
    torch.testing.assert_close(attend(placed(case)).cpu(), twin, rtol=2e-5, atol=2e-6)


def test_scores_are_capped() -> None:
    case = stored(make_case(3, [(0, 20)], heads=(2, 1, 16), block_size=32))
    case.qkv[:, :32] *= 8
    keys, values = case.kv.data_BKL2SD[case.kv.tables_RM[0, 0], 0, 1, :, :20].double()
    q_HTD = case.qkv[:, :32].unflatten(1, (2, 16)).transpose(0, 1).double()
    scores = 5.0 * torch.tanh(q_HTD @ keys.T / 5.0)
    hidden = torch.ones(20, 20, dtype=torch.bool).triu(1)
    wanted = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ values
    got = attend(placed(case), soft_cap=5.0).cpu()
    torch.testing.assert_close(got.double(), wanted.transpose(0, 1).flatten(1), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_token_s_bits_do_not_depend_on_how_its_row_is_cut(geometry: dict) -> None:
    case = placed(stored(make_case(4, [(19, 3), (70, 75), (5, 1)], **geometry)), torch.bfloat16)
    whole = attend(case, alike=True)
    first, last = case.batch.starts[1:3]
    for at, stop in ((first, first + 1), (first + 3, first + 20), (last - 41, last), (last - 1, last)):
        part = attend(case, slice_batch(case.batch, at, stop), case.qkv[at:stop], alike=True)
        assert torch.equal(part, whole[at:stop]), (at, stop)


def test_tiles_cover_every_token_once() -> None:
    case = make_case(5, [(0, 200), (3, 1), (0, 64)], heads=(8, 2, 16))
    tiles = query_tiles(case.batch.starts, case.heads).tolist()
    assert [t for first, count in tiles for t in range(first, first + count)] == list(range(265))
    assert max(count for _, count in tiles) == tokens_of_a_tile(case.heads) == 32


def test_rows_without_context_may_go_another_way() -> None:
    starts, firsts = (0, 1500, 1501, 3000, 3900), (0, 7, 64, 0)
    group = PagedKV(torch.empty(1, 1, 1, 2, 1, 1), torch.empty(1, 1))
    assert fresh_spans(starts, firsts, [group]) == ((0, 1500),)
    assert fresh_spans(starts, firsts, [group, PagedKV(group.data_BKL2SD, group.tables_RM, 1499)]) == ()
    heads = make_case(0, [(0, 1)]).heads
    covered = [
        t for first, count in query_tiles(starts, heads, ((0, 1500),)) for t in range(first, first + count)
    ]
    assert covered == list(range(1500, 3900))


def test_attention_over_contiguous_keys_is_attention() -> None:
    case = placed(stored(make_case(6, [(0, 40), (3, 2), (0, 70)], heads=(6, 2, 16))))
    wanted, got = attend(case), torch.full_like(attend(case), 7.0)
    spans = ((0, 40), (42, 112))
    attention_fresh(case.qkv, case.heads, spans, got)
    for start, stop in spans:
        torch.testing.assert_close(got[start:stop], wanted[start:stop], rtol=1e-4, atol=1e-5)
    assert bool((got[40:42] == 7.0).all())
