"""The residual stream with its norm, and the gated activation, against torch."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.gpu.pointwise import add_norm, add_norm_twin, norm, silu_mul, silu_mul_twin

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 64), (5, 576), (3, 1000)])
def test_norm_and_sum(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(shape[1])
    x, delta = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2))
    weight = torch.rand(shape[1], device=DEVICE) + 0.5
    alone, wanted_alone = norm(x, weight, 1e-5), add_norm_twin(torch.zeros_like(x), x.clone(), weight, 1e-5)
    torch.testing.assert_close(alone, wanted_alone, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    ours, theirs = x.clone(), x.clone()
    got, wanted = add_norm(delta, ours, weight, 1e-5), add_norm_twin(delta, theirs, weight, 1e-5)
    # The interpreter cuts where a GPU rounds.
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(got, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 8), (4, 2050), (3, 3072)])
def test_gated_activation(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = (5 * torch.randn(shape, device=DEVICE)).to(dtype)
    wanted = silu_mul_twin(gate_up)
    torch.testing.assert_close(silu_mul(gate_up), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_rows_of_a_wider_matrix_are_read_in_place() -> None:
    wide = torch.randn(6, 100, device=DEVICE)
    part, weight = wide[:, :64], torch.ones(64, device=DEVICE)
    torch.testing.assert_close(norm(part, weight, 0.0), norm(part.contiguous(), weight, 0.0))
    torch.testing.assert_close(silu_mul(part), silu_mul(part.contiguous()))


def test_nothing_comes_of_nothing() -> None:
    empty = torch.empty(0, 64, device=DEVICE)
    assert norm(empty, torch.ones(64, device=DEVICE), 1e-5).shape == (0, 64)
    assert silu_mul(empty).shape == (0, 32)
