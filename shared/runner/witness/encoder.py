"""The witness encoder: embedding rows made from media bytes, and read back for placeholder positions.

Owns how rows are packed into blocks of the ``ec`` arena: row r lies in the item's block
``r // rows_per_block``. Owns no bookkeeping of blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from xxhash import xxh3_64_intdigest

from shared.kernels.checksum import packed_checksum
from shared.runner.base import EncoderRunner
from shared.runner.witness_config import WitnessConfig
from shared.step import EncodeItem, EncodePlan, EncodeResult


class EmbeddingRows:
    """Embedding rows in the blocks of an ``ec`` arena, of ``rows_per_block`` times ``row_bytes`` each.

    ``data`` is all blocks of the arena, one after the other. The rows are views, read in place.
    """

    def __init__(self, data: memoryview, rows_per_block: int, row_bytes: int) -> None:
        self._data = data.cast("B")
        self._rows_per_block = rows_per_block
        self._row_bytes = row_bytes

    def row(self, block_ids: Sequence[int], index: int) -> memoryview:
        """The bytes of one row of an item; valid until ``close``."""
        block, slot = divmod(index, self._rows_per_block)
        start = (block_ids[block] * self._rows_per_block + slot) * self._row_bytes
        return self._data[start : start + self._row_bytes]

    def word(self, block_ids: Sequence[int], index: int, key: int) -> int:
        """What stands for the row in an entry: the digest of its bytes as they are now."""
        return xxh3_64_intdigest(self.row(block_ids, index), key)

    def blocks(self, block_ids: Sequence[int], num_rows: int) -> Iterator[memoryview]:
        """The valid bytes of an item, block by block."""
        for block_id in block_ids:
            rows = min(num_rows, self._rows_per_block)
            start = block_id * self._rows_per_block * self._row_bytes
            yield self._data[start : start + rows * self._row_bytes]
            num_rows -= rows

    def close(self) -> None:
        """Let go of the arena, so that it can be unmapped."""
        self._data.release()


class WitnessEncoderRunner(EncoderRunner):
    """Encoder over the ``ec`` arena's block data. ``row_bytes`` of the config is a row's length."""

    def __init__(self, config: WitnessConfig, ec_data: memoryview, rows_per_block: int) -> None:
        self._config = config
        self._rows = EmbeddingRows(ec_data, rows_per_block, config.row_bytes)

    def execute(self, plan: EncodePlan) -> EncodeResult:
        return EncodeResult(plan.step_id, tuple(self._encode(item) for item in plan.items))

    def close(self) -> None:
        self._rows.close()

    def _encode(self, item: EncodeItem) -> int:
        prefix = self._config.key.to_bytes(8, "little") + hashlib.sha256(item.data).digest()
        for index in range(item.num_rows):
            row = hashlib.shake_128(prefix + index.to_bytes(8, "little")).digest(self._config.row_bytes)
            self._rows.row(item.block_ids, index)[:] = row
        return packed_checksum(self._rows.blocks(item.block_ids, item.num_rows))
