"""Rotary position embedding: the angles of a step, the same for all layers.

Shapes: T = tokens, D = half of the head dimension.
"""

from __future__ import annotations

import math

import torch


def frequencies(head_dim: int, theta: float) -> torch.Tensor:
    """Angle per position of each pair, [D] (Su et al., 2021)."""
    exponents_D = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / theta**exponents_D


def stretch_long_waves(
    freq_D: torch.Tensor, factor: float, low_freq_factor: float, high_freq_factor: float, max_position: int
) -> torch.Tensor:
    """Llama 3's scaling: wavelengths above ``max_position / low_freq_factor`` grow by ``factor``,
    those below ``max_position / high_freq_factor`` stay, in between it ramps linearly in frequency."""
    turns_D = max_position * freq_D / (2 * math.pi)
    ramp_D = ((turns_D - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0)
    return freq_D * ramp_D + freq_D / factor * (1.0 - ramp_D)


class RotaryEmbedding:
    """Cosine and sine for any positions, computed in float32 from the frequencies."""

    def __init__(self, freq_D: torch.Tensor) -> None:
        self._freq_D = freq_D

    def __call__(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), [T, D] each."""
        angles_TD = positions_T[:, None].float() * self._freq_D
        return angles_TD.cos(), angles_TD.sin()
