"""What stands between the matrix products of a layer, one pass over memory each: the residual stream with its
norm, and the gated activation. Arithmetic in float32, rounded once a value.

Shapes: T = tokens, E = hidden features, I = intermediate features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def norm(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` (Zhang and Sennrich, 2019), new rows."""
    out_TE = torch.empty_like(x_TE)
    _launch(x_TE, x_TE, weight_E, out_TE, eps, add=False)
    return out_TE


def add_norm(delta_TE: torch.Tensor, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """Add ``delta`` to the residual stream ``x`` in place; returns the norm of the sum as it was rounded."""
    out_TE = torch.empty_like(x_TE)
    _launch(delta_TE, x_TE, weight_E, out_TE, eps, add=True)
    return out_TE


def add_norm_twin(
    delta_TE: torch.Tensor, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> torch.Tensor:
    """Torch reference of ``add_norm``."""
    x_TE += delta_TE
    wide_TE = x_TE.float()
    normed_TE = wide_TE * torch.rsqrt(wide_TE.square().mean(-1, keepdim=True) + eps) * weight_E.float()
    return normed_TE.to(x_TE.dtype)


def _launch(
    delta_TE: torch.Tensor,
    x_TE: torch.Tensor,
    weight_E: torch.Tensor,
    out_TE: torch.Tensor,
    eps: float,
    *,
    add: bool,
) -> None:
    tokens, hidden = x_TE.shape
    if not tokens:
        return
    width = triton.next_power_of_2(hidden)
    strides = delta_TE.stride(0), x_TE.stride(0), out_TE.stride(0)
    warps = 8 if width >= 4096 else 4
    _add_norm[(tokens,)](
        delta_TE, x_TE, weight_E, out_TE, *strides, eps, HIDDEN=hidden, WIDTH=width, ADD=add, num_warps=warps
    )


@triton.jit
def _add_norm(
    delta, x, weight, out, delta_stride, x_stride, out_stride, eps,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """One token a program."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < HIDDEN
    row = tl.load(x + token * x_stride + at, mask=inside, other=0)
    if ADD:
        more = tl.load(delta + token * delta_stride + at, mask=inside, other=0)
        row = (row.to(tl.float32) + more.to(tl.float32)).to(row.dtype)
        tl.store(x + token * x_stride + at, row, mask=inside)
    wide = row.to(tl.float32)
    over = tl.rsqrt(tl.sum(wide * wide, 0) / HIDDEN + eps)
    scale = tl.load(weight + at, mask=inside, other=0).to(tl.float32)
    tl.store(out + token * out_stride + at, wide * over * scale, mask=inside)


def silu_mul(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, where each row holds them pair by pair: gate, up, gate, up ..."""
    tokens, width = gate_up_T2I.shape
    out_TI = torch.empty(tokens, width // 2, dtype=gate_up_T2I.dtype, device=gate_up_T2I.device)
    if tokens:
        grid = (triton.cdiv(width // 2, _PIECE), tokens)
        _silu_mul[grid](gate_up_T2I, out_TI, width // 2, gate_up_T2I.stride(0), PIECE=_PIECE, num_warps=4)
    return out_TI


def silu_mul_twin(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """Torch reference of ``silu_mul``."""
    gate_TI, up_TI = gate_up_T2I.float().unflatten(-1, (-1, 2)).unbind(-1)
    gated_TI: torch.Tensor = torch.nn.functional.silu(gate_TI) * up_TI
    return gated_TI.to(gate_up_T2I.dtype)


_PIECE = 1024


@triton.jit
def _silu_mul(gate_up, out, inner, stride, PIECE: tl.constexpr):
    token = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    inside = at < inner
    both = tl.program_id(0) * PIECE * 2 + tl.arange(0, PIECE * 2)
    pairs = tl.load(gate_up + token * stride + both, mask=both < 2 * inner, other=0).to(tl.float32)
    gate, up = tl.split(pairs.reshape(PIECE, 2))
    tl.store(out + token * inner + at, gate / (1 + tl.exp(-gate)) * up, mask=inside)
