"""Blocks pulled on one card: bytes alone, and with checksums taken on the way."""

from __future__ import annotations

import torch

from shared.kernels.gpu.checksum import block_sums, gather_and_sum
from tests.bench.figures import Figure
from tests.bench.gpu.timing import graph_of, median_ms

#: The 8B shape: 36 layers, 8 heads, K and V, 16 tokens of 128 bfloat16 values.
HEADS, HEAD_BYTES = 8, 36 * 2 * 16 * 128 * 2
EXTENT = HEADS * HEAD_BYTES
POOL = 4096


def measure() -> list[Figure]:
    """GB/s pulled of scattered blocks of 2.36 MB; a copy of the same blocks beside it."""
    source = torch.randint(-(2**62), 2**62, (POOL, EXTENT // 8), device="cuda")
    target = torch.empty_like(source)
    rows: list[Figure] = []
    for count in (64, 512):
        order = torch.randperm(POOL, device="cuda")[: 2 * count].int()
        src, dst = order[:count], order[count:]
        gigabytes = count * EXTENT / 1e9
        ways = {
            "torch index copy": lambda s=src, d=dst: target.index_copy_(
                0, d.long(), source.index_select(0, s.long())
            ),
            "gather and sum": lambda s=src, d=dst: gather_and_sum(source, target, s, d, HEAD_BYTES),
            "sum alone": lambda s=src: block_sums(source, s, HEAD_BYTES),
        }
        for name, way in ways.items():
            ms = median_ms(graph_of(way))
            goal = 800.0 if name == "gather and sum" else None
            rows.append(
                Figure(
                    f"{name}, {count} blocks of 2.36 MB", gigabytes / ms * 1e3, "GB/s", goal, at_most=False
                )
            )
    return rows
