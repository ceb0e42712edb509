"""Selections whose fastest form depends on the device. On the CPU numpy's are several times faster
than torch's and read the same memory.

Shapes: R = rows, V = vocabulary, K = number selected.
"""

from __future__ import annotations

import numpy as np
import torch


def argmax(x_RV: torch.Tensor) -> tuple[list[int], list[bool]]:
    """For each row the lowest id of its largest logit, and whether that logit is finite (NaN is largest)."""
    if x_RV.device.type == "cpu" and x_RV.dtype in (torch.float32, torch.float64):
        rows = x_RV.numpy()
        ids = [int(row.argmax()) for row in rows]
        return ids, [bool(np.isfinite(row[i])) for row, i in zip(rows, ids, strict=True)]
    peak_R1, ids_R1 = x_RV.max(dim=1, keepdim=True)
    # Where several logits are equally large, which of them max() names depends on the device.
    first_R = (x_RV == peak_R1).int().argmax(dim=1)
    finite_R = torch.isfinite(peak_R1[:, 0])
    return torch.where(finite_R, first_R, ids_R1[:, 0]).tolist(), finite_R.tolist()


def largest(x_V: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` largest values in descending order; no NaN in ``x_V``, 0 < count <= V."""
    if x_V.device.type != "cpu":
        return torch.topk(x_V, count).values
    values = x_V.numpy()
    if count < len(values):
        values = np.partition(values, len(values) - count)[-count:]
    return torch.from_numpy(np.sort(values)[::-1].copy())


def kth_largest(x_V: torch.Tensor, k: int) -> float:
    """The k-th largest value, counted from 1; no NaN in ``x_V``, 0 < k <= V."""
    if x_V.device.type != "cpu":
        return float(torch.topk(x_V, k).values[-1])
    return float(np.partition(x_V.numpy(), x_V.shape[0] - k)[x_V.shape[0] - k])
