"""All layers in one call: compiled against the twin; the same bits alone, batched and chunked."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.batch import PagedKV
from shared.kernels.decoder import DecoderLayers, LayerWeights
from shared.kernels.library import available, set_threads
from tests.unit.kernels.geometry import Case, make_case, part_of, slice_batch

pytestmark = pytest.mark.skipif(not available(), reason="no C compiler")

CHUNKS = [(0, 11), (30, 1), (5, 3), (16, 1), (0, 2)]
HIDDEN, INNER = 48, 72


def _layers(case: Case, *, full: bool) -> list[LayerWeights[torch.Tensor]]:
    """Two layers; ``full``: with every optional tensor."""
    h = case.heads
    width = h.num_heads * h.dim
    torch.manual_seed(9)

    def matrix(n: int, k: int) -> torch.Tensor:
        return (torch.randn(n, k) / k**0.5).bfloat16()

    def vector(n: int) -> torch.Tensor | None:
        return torch.randn(n) * 0.1 if full else None

    return [
        LayerWeights(
            attn_norm_E=torch.rand(HIDDEN),
            qkv_WE=matrix(h.qkv_width, HIDDEN),
            o_EW=matrix(HIDDEN, width),
            mlp_norm_E=torch.rand(HIDDEN),
            gate_up_2IE=matrix(2 * INNER, HIDDEN),
            down_EI=matrix(HIDDEN, INNER),
            qkv_bias_W=vector(h.qkv_width),
            o_bias_E=vector(HIDDEN),
            gate_up_bias_2I=vector(2 * INNER),
            down_bias_E=vector(HIDDEN),
            q_norm_D=vector(h.dim),
            k_norm_D=vector(h.dim),
            group=i,
            index=1 - i,
        )
        for i in range(2)
    ]


def _two_groups(case: Case) -> list[PagedKV]:
    """Two KV groups with block tables of their own."""
    kv = case.kv
    flipped = kv.data_BKL2SD.flip(0).contiguous()
    tables = (kv.data_BKL2SD.shape[0] - 1 - kv.tables_RM).int()
    return [kv, PagedKV(flipped, tables, window=9)]


@pytest.mark.parametrize("full", [False, True])
def test_the_compiled_decoder_equals_its_twin(full: bool) -> None:
    case = make_case(1, CHUNKS)
    layers = _layers(case, full=full)
    other = case.copy()
    x = torch.randn(case.batch.num_tokens, HIDDEN)
    y = x.clone()
    groups, other_groups = _two_groups(case), _two_groups(other)
    DecoderLayers(layers, groups, case.heads)(x, case.batch)
    DecoderLayers(layers, other_groups, case.heads).twin(y, case.batch)
    torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    for a, b in zip(groups, other_groups, strict=True):
        torch.testing.assert_close(a.data_BKL2SD, b.data_BKL2SD, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_bits_alone_batched_and_chunked(threads: int) -> None:
    case = make_case(2, CHUNKS)
    layers = _layers(case, full=True)
    x = torch.randn(case.batch.num_tokens, HIDDEN)
    together, alone = x.clone(), case.copy()
    DecoderLayers(layers, _two_groups(case), case.heads)(together, case.batch)
    groups = _two_groups(alone)
    decoder = DecoderLayers(layers, groups, case.heads)
    assert decoder.batch_invariant
    set_threads(threads)
    try:
        for index in range(1, len(CHUNKS)):
            first, last = case.batch.starts[index : index + 2]
            y = x[first:last].clone()
            decoder(y, part_of(case, index))
            assert torch.equal(y, together[first:last])
        for first, last in ((0, 1), (1, 6), (6, 11)):
            y = x[first:last].clone()
            decoder(y, slice_batch(case.batch, first, last))
            assert torch.equal(y, together[first:last])
    finally:
        set_threads(1)


def test_geometry_that_the_kernels_cannot_take_runs_the_twin() -> None:
    case = make_case(3, [(3, 4)], heads=(2, 1, 20), block_size=6)
    layers = _layers(case, full=False)
    decoder = DecoderLayers(layers, [case.kv, case.kv], case.heads)
    assert not decoder.batch_invariant
    x = torch.randn(4, HIDDEN)
    y, other = x.clone(), case.copy()
    decoder(x, case.batch)
    DecoderLayers(layers, [other.kv, other.kv], case.heads).twin(y, case.batch)
    assert torch.equal(x, y)
