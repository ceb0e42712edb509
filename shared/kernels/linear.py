"""Matrix product with row-major weights.

Shapes: R = rows, K = inputs, N = outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from shared.kernels import records
from shared.kernels.batch import LANES, pointer
from shared.kernels.library import library

_LARGEST = 127.0


class Quantized(NamedTuple):
    """Int8 weights: ``values * scale``, one scale an output."""

    values_NK: torch.Tensor
    scale_N: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values_NK.shape

    def first(self, count: int) -> Quantized:
        """The first outputs alone."""
        return Quantized(self.values_NK[:count], self.scale_N[:count])


#: A weight matrix [N, K]: float32, bfloat16, or quantized.
Weight = torch.Tensor | Quantized


def quantized(weight_NK: torch.Tensor) -> Quantized:
    """Each output's weights as integers within 127, the largest of them 127 or -127."""
    wide_NK = weight_NK.float()
    peak_N1 = wide_NK.abs().amax(1, keepdim=True)
    scale_N1 = torch.where(peak_N1 > 0, peak_N1 / _LARGEST, torch.ones_like(peak_N1))
    return Quantized((wide_NK / scale_N1).round().to(torch.int8), scale_N1[:, 0].contiguous())


def linear(x_RK: torch.Tensor, weight_NK: Weight, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """``x . weight^T + bias`` as new float32 rows. bfloat16 weights are widened exactly; with quantized ones
    each row of ``x`` is quantized by a scale of its own, and the sums are exact.

    Compiled, a row's bits do not depend on the other rows.
    """
    lib = library()
    if lib is None or weight_NK.shape[1] % LANES:
        return linear_twin(x_RK, weight_NK, bias_N)
    x_RK = x_RK.contiguous()
    out_RN = torch.empty(x_RK.shape[0], weight_NK.shape[0])
    lib.triptych_linear(out_RN.data_ptr(), x_RK.data_ptr(), x_RK.shape[0], matrix(weight_NK, bias_N), 0)
    return out_RN


def linear_twin(x_RK: torch.Tensor, weight_NK: Weight, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """Torch reference of ``linear``."""
    if not isinstance(weight_NK, Quantized):
        return torch.nn.functional.linear(x_RK, weight_NK.float(), bias_N)
    peak_R1 = x_RK.abs().amax(1, keepdim=True)
    factor_R1 = torch.where(peak_R1 > 0, _LARGEST / peak_R1, torch.zeros_like(peak_R1))
    # In float64 the scaled inputs, and sums of products of integers, are exact.
    sums_RN = (x_RK.double() * factor_R1.double()).round() @ weight_NK.values_NK.double().T
    out_RN = sums_RN.float() * (peak_R1 / _LARGEST * weight_NK.scale_N)
    return out_RN if bias_N is None else out_RN + bias_N


def matrix(weight_NK: Weight, bias_N: torch.Tensor | None = None) -> records.Matrix:
    """The C record of a weight matrix; borrows the tensors, which must be contiguous."""
    n, k = weight_NK.shape
    if isinstance(weight_NK, Quantized):
        values, scales, kind = weight_NK.values_NK, weight_NK.scale_N, records.INT8
    else:
        values, scales = weight_NK, None
        kind = records.BFLOAT16 if weight_NK.dtype == torch.bfloat16 else records.FLOAT32
    return records.Matrix(values.data_ptr(), pointer(bias_N), pointer(scales), n, k, kind, 0)
