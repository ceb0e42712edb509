"""The gated activation of the feed-forward block.

Shapes: R = rows, I = intermediate features.
"""

from __future__ import annotations

import torch

from shared.kernels.batch import LANES
from shared.kernels.library import library


def silu_mul(gate_up_R2I: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, where each row holds gate, then up."""
    lib = library()
    rows, dim = gate_up_R2I.shape[0], gate_up_R2I.shape[1] // 2
    if lib is None or dim % LANES:
        return silu_mul_twin(gate_up_R2I)
    gate_up_R2I = gate_up_R2I.contiguous()
    out_RI = torch.empty(rows, dim)
    lib.triptych_silu_mul(out_RI.data_ptr(), gate_up_R2I.data_ptr(), rows, dim)
    return out_RI


def silu_mul_twin(gate_up_R2I: torch.Tensor) -> torch.Tensor:
    """Torch reference of ``silu_mul``."""
    gate_RI, up_RI = gate_up_R2I.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate_RI) * up_RI
