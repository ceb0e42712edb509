"""Prefill attention of the 8B shape (32 query heads, 8 kv heads of 128, bfloat16): ours over paged blocks,
and torch's own over contiguous keys."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from shared.kernels.batch import Batch, Heads, PagedKV
from shared.kernels.gpu.attention import attention, query_tiles
from tests.bench.figures import Figure
from tests.bench.gpu.timing import graph_of, median_ms

HEADS = Heads(32, 8, 128, scale=128**-0.5, eps=1e-6)
LAYERS, BLOCK = 36, 16
#: (sequences, tokens before, tokens in the step)
CASES = ((1, 0, 512), (1, 0, 2048), (1, 0, 8192), (4, 0, 4096), (1, 8192, 2048), (64, 512, 1), (32, 8192, 1))


def paged(count: int, past: int, new: int) -> tuple[Batch, PagedKV]:
    blocks = -(-(past + new) // BLOCK)
    pool = torch.empty(
        count * blocks, HEADS.num_kv_heads, LAYERS, 2, BLOCK, HEADS.dim, dtype=torch.bfloat16, device="cuda"
    )
    for block in range(0, len(pool), 256):
        pool[block : block + 256].normal_()
    tables = torch.randperm(count * blocks, device="cuda").view(count, blocks).int()
    nothing = torch.empty(0, device="cuda")
    batch = Batch(
        torch.arange(count, device="cuda", dtype=torch.int32).repeat_interleave(new),
        torch.arange(past, past + new, device="cuda", dtype=torch.int32).repeat(count),
        tuple(range(0, count * new + 1, new)),
        nothing,
        nothing,
    )
    return batch, PagedKV(pool, tables)


def measure() -> list[Figure]:
    """TFLOP/s of each case."""
    rows: list[Figure] = []
    for count, past, new in CASES:
        batch, kv = paged(count, past, new)
        tiles = torch.from_numpy(query_tiles(batch.starts, HEADS)).cuda()
        qkv = torch.randn(count * new, HEADS.qkv_width, device="cuda").bfloat16()
        flops = 4.0 * HEADS.num_heads * HEADS.dim * count * new * (past + (new + 1) / 2)
        ways = {"paged": lambda b=batch, k=kv, t=tiles, x=qkv: attention(x, HEADS, b, k, 3, t)}
        if not past:
            q, k, v = (
                x.unflatten(0, (count, new)).transpose(1, 2)
                for x in qkv.unflatten(1, (-1, HEADS.dim)).split((32, 8, 8), 1)
            )
            for name, backend in (
                ("cudnn", SDPBackend.CUDNN_ATTENTION),
                ("flash", SDPBackend.FLASH_ATTENTION),
            ):

                def own(q=q, k=k, v=v, backend=backend) -> object:  # type: ignore[no-untyped-def]
                    with sdpa_kernel(backend):
                        return torch.nn.functional.scaled_dot_product_attention(
                            q, k, v, is_causal=True, scale=1.0, enable_gqa=True
                        )

                ways[name] = own
        for name, way in ways.items():
            what = f"attention {count} x {past}+{new}, {name}"
            rows.append(Figure(what, flops / median_ms(graph_of(way)) / 1e9, "TFLOP/s"))
        del batch, kv, qkv
    return rows
