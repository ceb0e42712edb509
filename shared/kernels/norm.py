"""Root-mean-square norm.

Shapes: R = rows, D = features.
"""

from __future__ import annotations

import torch

from shared.kernels.batch import LANES
from shared.kernels.library import library


def rms_norm(x_RD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight``, each row for itself (Zhang and Sennrich, 2019)."""
    lib = library()
    rows, dim = x_RD.shape
    if lib is None or dim % LANES:
        return rms_norm_twin(x_RD, weight_D, eps)
    x_RD = x_RD.contiguous()
    out_RD = torch.empty_like(x_RD)
    lib.triptych_rms_norm(out_RD.data_ptr(), x_RD.data_ptr(), weight_D.data_ptr(), rows, dim, eps)
    return out_RD


def rms_norm_twin(x_RD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Torch reference of ``rms_norm``; any number of leading dimensions."""
    return x_RD * torch.rsqrt(x_RD.square().mean(-1, keepdim=True) + eps) * weight_D
