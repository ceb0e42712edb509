"""Safetensors files: checked headers, memory-mapped reading, streamed writing.

Owns the format; not what the tensors mean. Format: 8 bytes little-endian header length, a JSON
object name -> {dtype, shape, data_offsets}, then the data. Nothing in such a file is ever executed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from shared.errors import ConfigError

#: The element types that are read, by their names in the header.
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I8": torch.int8}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 64 << 20


@dataclass(frozen=True)
class TensorInfo:
    """One tensor's element type, shape, and byte range in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class TensorFile:
    """A safetensors file, memory-mapped: pages are read on first use and shared by all processes."""

    def __init__(self, path: Path) -> None:
        """Read and check the header. Raises ConfigError (naming the file) on anything malformed."""
        self._path = path
        try:
            self._size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= min(_MAX_HEADER_BYTES, self._size - 8):
                    raise ConfigError(f"{path.name} is not a safetensors file")
                header = json.loads(file.read(length))
        except OSError as error:
            raise ConfigError(f"{path.name} of the model directory cannot be read") from error
        except ValueError as error:
            raise ConfigError(f"{path.name} is not a safetensors file") from error
        if not isinstance(header, dict):
            raise ConfigError(f"{path.name} is not a safetensors file")
        self.tensors: Mapping[str, TensorInfo] = dict(self._check(header, 8 + length))
        self._bytes: torch.Tensor | None = None

    def get(self, name: str) -> torch.Tensor:
        """The tensor as a view of the mapped file; not to be written.

        Raises ConfigError when it is not there or has an unsupported element type.
        """
        info = self.tensors.get(name)
        if info is None:
            raise ConfigError(f"{self._path.name} has no tensor {name}")
        dtype = DTYPES.get(info.dtype)
        if dtype is None:
            known = ", ".join(sorted(DTYPES))
            raise ConfigError(f"tensor {name} has element type {info.dtype}; supported: {known}")
        if self._bytes is None:
            self._bytes = torch.from_file(str(self._path), False, self._size, dtype=torch.uint8)
        part = self._bytes[info.start : info.end]
        if info.start % dtype.itemsize:
            part = part.clone()
        return part.view(dtype).view(info.shape)

    def _check(self, header: dict[str, Any], base: int) -> Iterator[tuple[str, TensorInfo]]:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            try:
                shape = tuple(int(n) for n in entry["shape"])
                start, end = (base + int(offset) for offset in entry["data_offsets"])
                dtype = str(entry["dtype"])
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"{self._path.name} has a malformed entry for {name}") from error
            fits = base <= start <= end <= self._size and all(n >= 0 for n in shape)
            if dtype in DTYPES:
                fits = fits and end - start == prod(shape) * DTYPES[dtype].itemsize
            if not fits:
                raise ConfigError(f"{self._path.name} has a tensor outside of its data: {name}")
            yield name, TensorInfo(dtype, shape, start, end)


def write_tensors(path: Path, tensors: Mapping[str, tuple[torch.dtype, Iterable[torch.Tensor]]]) -> None:
    """Write a file of tensors, each given as parts that are stacked along their first dimension and
    converted to the dtype. One part is in memory at a time. ``path`` is replaced at once, or not at all.

    Raises OSError.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, parts) in tensors.items():
        shapes = [tuple(part.shape) for part in parts]
        shape = (sum(s[0] for s in shapes), *shapes[0][1:])
        start, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for dtype, parts in tensors.values():
                for part in parts:
                    file.write(part.to(dtype).contiguous().view(-1).view(torch.uint8).numpy().data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
