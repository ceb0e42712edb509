"""Rotary angles against the formula in float64."""

from __future__ import annotations

import math

import torch

from shared.layers.rotary import RotaryEmbedding, frequencies, stretch_long_waves


def test_angles_follow_the_formula() -> None:
    cos, sin = RotaryEmbedding(frequencies(64, 10000.0))(torch.tensor([0, 1, 500], dtype=torch.int32))
    for t, position in enumerate((0, 1, 500)):
        for i in range(32):
            angle = position * 10000.0 ** (-2 * i / 64)
            assert math.isclose(cos[t, i], math.cos(angle), abs_tol=1e-4)
            assert math.isclose(sin[t, i], math.sin(angle), abs_tol=1e-4)


def test_long_waves_are_stretched_and_short_ones_kept() -> None:
    freq = torch.tensor([1.0, 0.01, 1e-5])
    out = stretch_long_waves(freq, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, max_position=1000)
    assert out[0] == freq[0]
    assert math.isclose(out[2], freq[2] / 8, rel_tol=1e-6)
    turns = 1000 * 0.01 / (2 * math.pi)
    ramp = (turns - 1.0) / 3.0
    assert math.isclose(out[1], 0.01 * ramp + 0.01 / 8 * (1 - ramp), rel_tol=1e-5)
