"""Random paged batches for kernel tests. Memory that no token wrote is poisoned with NaN."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shared.kernels.batch import Batch, Heads, PagedKV

NAN = float("nan")


@dataclass
class Case:
    """A batch of chunks over filled contexts; ``qkv`` is not yet rotated."""

    heads: Heads
    batch: Batch
    kv: PagedKV
    qkv: torch.Tensor

    def copy(self) -> Case:
        kv = PagedKV(self.kv.data_BKL2SD.clone(), self.kv.tables_RM, self.kv.window)
        return Case(self.heads, self.batch, kv, self.qkv.clone())


def make_case(
    seed: int,
    chunks: list[tuple[int, int]],
    *,
    heads: tuple[int, int, int] = (6, 2, 16),
    block_size: int = 8,
    num_layers: int = 2,
    window: int | None = None,
) -> Case:
    """``chunks``: (tokens before the step, tokens in the step), one row each."""
    torch.manual_seed(seed)
    num_heads, num_kv_heads, dim = heads
    geometry = Heads(num_heads, num_kv_heads, dim, scale=dim**-0.5, eps=1e-5)
    blocks_of = [-(-(past + new) // block_size) for past, new in chunks]
    order = torch.randperm(sum(blocks_of) + 3)
    data = torch.full((len(order), num_kv_heads, num_layers, 2, block_size, dim), NAN)
    rows = torch.randperm(len(chunks)).tolist()
    tables = torch.full((len(chunks), max(blocks_of)), 10**6, dtype=torch.int32)
    taken = 0
    for row, count, (past, _) in zip(rows, blocks_of, chunks, strict=True):
        tables[row, :count] = order[taken : taken + count]
        taken += count
        for position in range(past):
            block = tables[row, position // block_size]
            data[block, :, :, :, position % block_size] = torch.randn(num_kv_heads, num_layers, 2, dim)
    positions = [torch.arange(past, past + new, dtype=torch.int32) for past, new in chunks]
    starts = [0]
    for _, new in chunks:
        starts.append(starts[-1] + new)
    angles = torch.cat(positions)[:, None] * torch.rand(dim // 2)
    batch = Batch(
        rows_T=torch.cat(
            [torch.full((new,), row, dtype=torch.int32) for row, (_, new) in zip(rows, chunks, strict=True)]
        ),
        positions_T=torch.cat(positions),
        starts=tuple(starts),
        cos_TD=angles.cos(),
        sin_TD=angles.sin(),
    )
    qkv = torch.randn(starts[-1], geometry.qkv_width)
    return Case(geometry, batch, PagedKV(data, tables, window), qkv)


def part_of(case: Case, index: int) -> Batch:
    """The batch with one chunk alone."""
    first, last = case.batch.starts[index], case.batch.starts[index + 1]
    return slice_batch(case.batch, first, last)


def slice_batch(batch: Batch, first: int, last: int) -> Batch:
    """Tokens first .. last of one chunk, as a batch of their own."""
    return Batch(
        batch.rows_T[first:last].clone(),
        batch.positions_T[first:last].clone(),
        (0, last - first),
        batch.cos_TD[first:last].clone(),
        batch.sin_TD[first:last].clone(),
    )
