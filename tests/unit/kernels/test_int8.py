"""Products with int8 weights: near the exact ones, and a row alone is the row in any company."""

from __future__ import annotations

import pytest
import torch

from shared.kernels import library
from shared.kernels.linear import Quantized, linear, linear_twin, quantized

pytestmark = pytest.mark.skipif(not library.available(), reason="no C compiler")


def weight(n: int, k: int) -> Quantized:
    return quantized(torch.randn(n, k) * torch.rand(n, 1))


def test_quantized_weights_are_within_half_a_step() -> None:
    torch.manual_seed(0)
    exact = torch.randn(40, 64) * torch.logspace(-3, 3, 40)[:, None]
    exact[7] = 0
    made = quantized(exact)
    assert made.values_NK.abs().amax(1).tolist() == [0 if n == 7 else 127 for n in range(40)]
    error = (made.values_NK.double() * made.scale_N[:, None] - exact).abs()
    assert bool((error <= made.scale_N[:, None] * 0.5001).all())


@pytest.mark.parametrize(("n", "k"), [(1, 8), (5, 24), (50, 576), (97, 64), (48, 4096), (13, 9000)])
def test_products_equal_their_twin(n: int, k: int) -> None:
    torch.manual_seed(n * k)
    w, bias = weight(n, k), torch.randn(n)
    for rows in (1, 2, 3, 4, 5, 8, 17):
        x = torch.randn(rows, k) * torch.rand(rows, 1) * 100
        torch.testing.assert_close(linear(x, w), linear_twin(x, w), rtol=1e-6, atol=0)
        torch.testing.assert_close(linear(x, w, bias), linear(x, w) + bias, rtol=0, atol=0)


def test_products_are_near_the_exact_ones() -> None:
    torch.manual_seed(1)
    exact, x = torch.randn(300, 576), torch.randn(9, 576)
    wanted = x.double() @ exact.double().T
    error = (linear(x, quantized(exact)) - wanted).norm() / wanted.norm()
    assert error < 0.02


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_has_the_same_bits_alone_beside_loud_neighbours_and_in_any_team(threads: int) -> None:
    torch.manual_seed(2)
    w = weight(131, 576)
    x = torch.randn(33, 576)
    x[1::2] *= 1e4
    together = linear(x, w)
    assert library.set_threads(threads) == threads
    try:
        assert torch.equal(linear(x, w), together)
        for row in range(33):
            assert torch.equal(linear(x[row : row + 1], w)[0], together[row])
    finally:
        library.set_threads(1)


def test_zero_rows_give_zero_and_rows_that_are_not_finite_give_nothing_finite() -> None:
    w = weight(20, 64)
    x = torch.randn(4, 64)
    x[1] = 0
    x[2, 5] = torch.nan
    x[3, 60] = torch.inf
    out = linear(x, w)
    assert bool((out[1] == 0).all())
    assert bool(out[2:].isnan().all())
    assert torch.equal(out[0], linear(x[:1], w)[0])


def test_extreme_values_do_not_overflow() -> None:
    w = Quantized(torch.full((3, 4096), 127, dtype=torch.int8), torch.ones(3))
    w.values_NK[1] = -127
    x = torch.full((2, 4096), -5.0)
    assert linear(x, w).tolist() == [[-5.0 * 127 * 4096, 5.0 * 127 * 4096, -5.0 * 127 * 4096]] * 2
