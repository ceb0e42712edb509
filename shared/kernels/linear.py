"""Matrix product with row-major weights.

Shapes: R = rows, K = inputs, N = outputs.
"""

from __future__ import annotations

import torch

from shared.kernels import records
from shared.kernels.batch import LANES, pointer
from shared.kernels.library import library


def linear(x_RK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """``x . weight^T + bias`` as new float32 rows. Weights are float32 or bfloat16 (widened exactly).

    Compiled, a row's bits do not depend on the other rows.
    """
    lib = library()
    if lib is None or weight_NK.shape[1] % LANES:
        return linear_twin(x_RK, weight_NK, bias_N)
    x_RK = x_RK.contiguous()
    out_RN = torch.empty(x_RK.shape[0], weight_NK.shape[0])
    lib.triptych_linear(out_RN.data_ptr(), x_RK.data_ptr(), x_RK.shape[0], matrix(weight_NK, bias_N), 0)
    return out_RN


def linear_twin(
    x_RK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """Torch reference of ``linear``."""
    return torch.nn.functional.linear(x_RK, weight_NK.float(), bias_N)


def matrix(weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> records.Matrix:
    """The C record of a weight matrix; borrows both tensors, which must be contiguous."""
    n, k = weight_NK.shape
    return records.Matrix(weight_NK.data_ptr(), pointer(bias_N), n, k, weight_NK.dtype == torch.bfloat16, 0)
