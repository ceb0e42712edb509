"""Decode steps as CUDA graphs: one launch a step instead of hundreds.

Owns the graphs, one a batch size, captured when the runner is built. A step of another size runs in the next
larger graph: rows that fill it up stand at position -1, where every kernel passes them over, so they cost
their part of the matrix products (which at these sizes wait for the weights anyway) and nothing else.

Shapes: B = rows of a graph, S = rows of a step, V = valid tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from shared.models.gpu_decoder import GpuDecoder
from shared.runner.gpu.device import Device
from shared.runner.gpu.rows import PADDING, DeviceRows
from shared.step import RowStep

#: Batch sizes that are captured, as far as the runner's rows go.
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


class Decoded(NamedTuple):
    """Valid until the next step but for ``tokens_S``: the likeliest tokens, which ``last_R`` has too."""

    rows_S: torch.Tensor
    logits_SV: torch.Tensor
    tokens_S: torch.Tensor


class DecodeSteps(ABC):
    """A fast way for steps in which each row has one token."""

    @abstractmethod
    def __call__(self, steps: Sequence[RowStep]) -> Decoded | None:
        """Launch the step, whose tables are up to date; None when it must go the general way."""


class NoGraphs(DecodeSteps):
    """Every step goes the general way."""

    def __call__(self, steps: Sequence[RowStep]) -> Decoded | None:
        return None


class DecodeGraphs(DecodeSteps):
    """Captured when it is built: ``rows`` are still unused then."""

    def __init__(self, decoder: GpuDecoder, rows: DeviceRows, device: Device, max_rows: int) -> None:
        self._device = device
        largest = min(bisect_left(SIZES, max_rows), len(SIZES) - 1)
        self._sizes = SIZES[: largest + 1]
        pool = torch.cuda.graph_pool_handle()
        # The largest first: the others then fit into its memory.
        graphs = [_Graph(decoder, rows, size, device, pool) for size in reversed(self._sizes)]
        self._graphs = graphs[::-1]

    def __call__(self, steps: Sequence[RowStep]) -> Decoded | None:
        place = bisect_left(self._sizes, len(steps))
        return self._graphs[place].run(steps, self._device) if place < len(self._sizes) else None


class _Graph:
    def __init__(self, decoder: GpuDecoder, rows: DeviceRows, size: int, device: Device, pool: Any) -> None:
        self._size = size
        self._inputs_3B = torch.full((3, size), PADDING, dtype=torch.int32, device=device.device)
        step = decoder.decode_step(size)
        # What is compiled or chosen at first use must not be captured.
        token_ids_B, rows_B, positions_B = self._inputs_3B
        step(token_ids_B, rows_B, positions_B, rows.last_R)
        torch.cuda.synchronize(device.device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._logits_BV, self._tokens_B = step(token_ids_B, rows_B, positions_B, rows.last_R)
        self._step = step

    def run(self, steps: Sequence[RowStep], device: Device) -> Decoded:
        count = len(steps)
        device.upload_into(self._inputs_3B, DeviceRows.decode_inputs(steps, self._size))
        self._graph.replay()
        # The next step may be on its way before these tokens have left.
        return Decoded(self._inputs_3B[1, :count], self._logits_BV[:count], self._tokens_B[:count].clone())


def decode_steps(decoder: GpuDecoder, rows: DeviceRows, device: Device, max_rows: int) -> DecodeSteps:
    """Graphs where the device has them."""
    if device.device.type != "cuda":
        return NoGraphs()
    with torch.inference_mode():
        return DecodeGraphs(decoder, rows, device, max_rows)
