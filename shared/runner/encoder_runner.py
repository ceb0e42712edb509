"""The torch encoder runner: vision tower in, packed embedding rows in the ``ec`` arena out.

Pictures are encoded one after the other, so that a row never depends on what it shared a plan with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch

from shared.errors import ConfigError, InvalidMedia
from shared.kernels.checksum import packed_checksum
from shared.models.vision import VisionTower, load_vision_tower
from shared.runner.base import EncoderRunner
from shared.runner.kv_tensors import EmbeddingMemory, packed_rows
from shared.step import EncodeItem, EncodePlan, EncodeResult


class VisionEncoderRunner(EncoderRunner):
    """Encodes on the calling thread. ``num_threads`` is set for the whole process."""

    def __init__(self, model_dir: Path, embeddings: EmbeddingMemory, *, num_threads: int = 1) -> None:
        """``embeddings`` stays exported until ``close``. Raises ConfigError: no supported vision
        tower, or memory whose rows are not the model's."""
        torch.set_num_threads(num_threads)
        self._tower: VisionTower = load_vision_tower(model_dir)
        if embeddings.row_bytes != 4 * self._tower.hidden_size:
            raise ConfigError(f"embedding rows of {embeddings.row_bytes} bytes are not this model's")
        self._memory: EmbeddingMemory | None = embeddings

    def execute(self, plan: EncodePlan) -> EncodeResult:
        """As the base says. Raises InvalidMedia when an item's pixels do not make its rows."""
        if self._memory is None:
            raise RuntimeError("the runner is closed")
        memory = self._memory
        return EncodeResult(plan.step_id, tuple(self._encode(item, memory) for item in plan.items))

    def close(self) -> None:
        self._memory = None

    @torch.inference_mode()
    def _encode(self, item: EncodeItem, memory: EmbeddingMemory) -> int:
        rows = self._tower.encode(_pixels(item))
        if len(rows) != item.num_rows:
            raise InvalidMedia(f"the image makes {len(rows)} embedding rows, not {item.num_rows}")
        memory.tensor()[packed_rows(item.block_ids, item.num_rows, memory.rows_per_block)] = rows
        return packed_checksum(_valid_bytes(item, memory))


def _pixels(item: EncodeItem) -> torch.Tensor:
    """Tiles as uint8 [N, H, W, 3] from one picture [H, W, 3] or several tiles."""
    shape = item.shape if len(item.shape) == 4 else (1, *item.shape)
    if len(shape) != 4 or shape[3] != 3 or math.prod(shape) != len(item.data) or not item.data:
        raise InvalidMedia("the decoded image has an unexpected shape")
    return torch.frombuffer(bytearray(item.data), dtype=torch.uint8).view(shape)


def _valid_bytes(item: EncodeItem, memory: EmbeddingMemory) -> Iterator[memoryview]:
    """The item's rows as they lie in memory, block by block."""
    data = memory.data.cast("B")
    for index, block_id in enumerate(item.block_ids):
        rows = min(item.num_rows - index * memory.rows_per_block, memory.rows_per_block)
        start = block_id * memory.rows_per_block * memory.row_bytes
        yield data[start : start + max(rows, 0) * memory.row_bytes]
