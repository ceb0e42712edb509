"""Products whose rows do not depend on each other, to the bit."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.gpu.linear import Invariant, fastest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def matrix(rows: int, columns: int) -> torch.Tensor:
    return (torch.randn(rows, columns) / columns**0.5).to(DEVICE, DTYPE)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(1, 96, 64), (5, 160, 96), (40, 128, 192), (150, 257, 64)]
)
@pytest.mark.parametrize("biased", [False, True])
def test_products_are_those_of_torch(rows: int, outputs: int, inputs: int, biased: bool) -> None:
    torch.manual_seed(rows)
    x, weight = matrix(rows, inputs), matrix(outputs, inputs)
    bias = matrix(1, outputs)[0] if biased else None
    tolerance = 2e-2 if DEVICE == "cuda" else 1e-5
    got = Invariant()(x, weight, bias)
    torch.testing.assert_close(got, fastest(x, weight, bias), rtol=tolerance, atol=tolerance)


def test_nothing_comes_of_nothing() -> None:
    assert Invariant()(matrix(0, 64), matrix(32, 64)).shape == (0, 32)


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 12288), (1000, 4096)])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(outputs: int, inputs: int) -> None:
    torch.manual_seed(1)
    x, weight, linear = matrix(3000, inputs), matrix(outputs, inputs), Invariant()
    whole = linear(x, weight)
    for rows in (1, 2, 15, 16, 17, 33, 64, 65, 128, 500, 2999):
        at = 3000 - rows
        assert torch.equal(linear(x[at:], weight), whole[at:]), rows
        assert torch.equal(linear(x[:rows], weight), whole[:rows]), rows
