"""The counter-based random generator behind every draw. Owns no state: a draw is a pure function.

Philox 2x64 with ten rounds, after Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
(2011): the request's seed is the key, (token position, choice index) the 128-bit counter. A
request may therefore be moved, replayed or batched otherwise without changing a single draw.
"""

from __future__ import annotations

_MASK = 0xFFFF_FFFF_FFFF_FFFF
_MULTIPLIER = 0xD2B7_4407_B1CE_6E93
_WEYL = 0x9E37_79B9_7F4A_7C15
_ROUNDS = 10


def philox2x64(counter: tuple[int, int], key: int) -> tuple[int, int]:
    """128 random bits as two words. All arguments are unsigned 64-bit integers."""
    low, high = counter
    for _ in range(_ROUNDS):
        product = _MULTIPLIER * low
        low = (product >> 64) ^ key ^ high
        high = product & _MASK
        key = (key + _WEYL) & _MASK
    return low, high


def uniform(seed: int, choice: int, position: int) -> float:
    """A double in [0, 1), a multiple of 2^-53.

    ``position`` is that of the token being drawn, counted over prompt and answer. ``seed`` is
    taken modulo 2^64.
    """
    return (philox2x64((position, choice), seed & _MASK)[0] >> 11) * 2.0**-53
