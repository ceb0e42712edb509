"""Matrix product, norm and activation: compiled against twin and float64; rows are independent."""

from __future__ import annotations

import pytest
import torch

from shared.kernels import library
from shared.kernels.activation import silu_mul, silu_mul_twin
from shared.kernels.linear import linear, linear_twin
from shared.kernels.norm import rms_norm, rms_norm_twin

pytestmark = pytest.mark.skipif(not library.available(), reason="no C compiler")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "k"), [(1, 8), (5, 24), (50, 576), (97, 64), (48, 4096), (13, 9000)])
def test_linear_equals_float64_and_its_twin(n: int, k: int, dtype: torch.dtype) -> None:
    torch.manual_seed(n * k)
    weight = torch.randn(n, k).to(dtype)
    bias = torch.randn(n)
    for rows in (1, 2, 3, 4, 5, 8, 17):
        x = torch.randn(rows, k)
        exact = x.double() @ weight.double().T
        out = linear(x, weight)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=3e-6 * k**0.5)
        torch.testing.assert_close(out, linear_twin(x, weight), rtol=1e-4, atol=1e-5 * k**0.5)
        torch.testing.assert_close(linear(x, weight, bias), out + bias)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_has_the_same_bits_in_any_batch_dtype_and_team(threads: int) -> None:
    torch.manual_seed(0)
    shapes = ((200, 576), (160, 48), (50, 8), (7, 1536))
    weights = [torch.randn(n, k).bfloat16() for n, k in shapes]
    inputs = [torch.randn(33, k) for _, k in shapes]
    together = [linear(x, w) for x, w in zip(inputs, weights, strict=True)]
    assert library.set_threads(threads) == threads
    try:
        for x, w, expected in zip(inputs, weights, together, strict=True):
            for rows in (1, 2, 3, 4, 5, 6, 7, 9, 16, 32):
                assert torch.equal(linear(x[:rows], w), expected[:rows])
                assert torch.equal(linear(x[-rows:], w.float()), expected[-rows:])
    finally:
        library.set_threads(1)


def test_rms_norm_equals_float64_and_its_twin() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(7, 576) * 30, torch.rand(576)
    out = rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(out, rms_norm_twin(x, weight, 1e-5), rtol=1e-5, atol=1e-6)
    exact = rms_norm_twin(x.double(), weight.double(), 1e-5)
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-6)
    assert torch.equal(rms_norm(x[3:4], weight, 1e-5), out[3:4])


def test_silu_mul_equals_float64_and_its_twin_over_the_whole_range() -> None:
    torch.manual_seed(2)
    gate = torch.cat([torch.linspace(-120, 120, 2000), torch.linspace(-1, 1, 48)])
    x = torch.stack([torch.cat([gate, torch.randn(2048)]), torch.randn(4096)])
    out = silu_mul(x)
    torch.testing.assert_close(out, silu_mul_twin(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.double(), silu_mul_twin(x.double()), rtol=2e-6, atol=1e-30)


def test_non_finite_inputs_are_never_hidden() -> None:
    x = torch.ones(2, 16)
    x[0, 3] = float("nan")
    assert rms_norm(x, torch.ones(16), 1e-5)[0].isnan().all()
    assert linear(x, torch.ones(4, 16))[0].isnan().all()
    assert silu_mul(x)[0, 3].isnan()
    assert linear(x, torch.ones(4, 16))[1].isfinite().all()
