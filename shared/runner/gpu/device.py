"""How a step's inputs reach a device, and its results come back, without the host waiting in between.

``CudaDevice`` copies through pinned memory; ``HostDevice`` is the same for tensors of the CPU, where there is
nothing to wait for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray


class Download(ABC):
    """Tensors on their way to the host."""

    @abstractmethod
    def wait(self) -> list[torch.Tensor]:
        """The tensors, on the CPU, once they are there."""


class Device(ABC):
    """One device, used by one thread."""

    device: torch.device

    @abstractmethod
    def upload(self, values: NDArray[np.int32]) -> torch.Tensor:
        """These values on the device, for work that is launched from now on; ``values`` is free at once."""

    @abstractmethod
    def upload_into(self, target: torch.Tensor, values: NDArray[np.int32]) -> None:
        """As ``upload``, into memory that is there, of the shape of ``values``."""

    @abstractmethod
    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        """Begin to copy what work launched so far makes of these; they must not change until it is there."""


class HostDevice(Device):
    """The CPU."""

    device = torch.device("cpu")

    def upload(self, values: NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(values.copy())

    def upload_into(self, target: torch.Tensor, values: NDArray[np.int32]) -> None:
        target.copy_(torch.from_numpy(values))

    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        return _Here(tensors)


class _Here(Download):
    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)

    def wait(self) -> list[torch.Tensor]:
        return self._tensors


class CudaDevice(Device):
    """A CUDA device. Results leave on a stream of their own, beside the next step."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        self._leaving = torch.cuda.Stream(self.device)

    def upload(self, values: NDArray[np.int32]) -> torch.Tensor:
        return _pinned(values).to(self.device, non_blocking=True)

    def upload_into(self, target: torch.Tensor, values: NDArray[np.int32]) -> None:
        target.copy_(_pinned(values), non_blocking=True)

    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        self._leaving.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._leaving):
            copies = []
            for tensor in tensors:
                pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                copies.append(pinned.copy_(tensor, non_blocking=True))
                tensor.record_stream(self._leaving)
            arrived = torch.cuda.Event()
            arrived.record(self._leaving)
        return _Arriving(copies, arrived)


def _pinned(values: NDArray[np.int32]) -> torch.Tensor:
    """A copy in pinned memory; torch's cache keeps that until a copy out of it has run."""
    pinned = torch.empty(values.shape, dtype=torch.int32, pin_memory=True)
    pinned.numpy()[:] = values
    return pinned


class _Arriving(Download):
    def __init__(self, tensors: list[torch.Tensor], arrived: torch.cuda.Event) -> None:
        self._tensors = tensors
        self._arrived = arrived

    def wait(self) -> list[torch.Tensor]:
        self._arrived.synchronize()
        return self._tensors
