"""One sequence's bookkeeping: its tokens, its block tables, and how far each block has come.

Owns plain state for ``manager``; knows no pool.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.kv_cache.block_hash import BlockMedia
from shared.kv_cache.block_pool import BlockKey


class SequenceState:
    """Positions and indices of one sequence. A full block goes through these marks, in this order:

        reserved   index < len(tables[g])     it has a block
        sealed     index < num_sealed         some step was told to make its checksums
        committed  index < len(keys)          its tokens are known, its KV computed, its hash made

    ``num_summed``: blocks from the front that have checksums in every group. ``tail_sealed``: number of
    tokens at which the partly filled tail was sealed last. ``write_start``: first position that the
    latest step may write. A ``tainted`` sequence commits nothing any more. ``tenant``: whose it is.
    """

    __slots__ = (
        "keys",
        "media",
        "num_sealed",
        "num_summed",
        "root",
        "tables",
        "tail_sealed",
        "tainted",
        "tenant",
        "token_ids",
        "write_start",
    )

    def __init__(
        self,
        token_ids: Sequence[int],
        media: dict[int, BlockMedia],
        root: bytes,
        tables: list[list[int]],
        tenant: str = "",
    ) -> None:
        self.token_ids = list(token_ids)
        self.media = media
        self.root = root
        self.tenant = tenant
        self.tables = tables
        self.keys: list[BlockKey] = []
        self.num_sealed = 0
        self.num_summed = 0
        self.tail_sealed = -1
        self.write_start = -1
        self.tainted = False

    def fork(self) -> SequenceState:
        """An independent twin over the same blocks."""
        tables = [list(table) for table in self.tables]
        twin = SequenceState(self.token_ids, self.media, self.root, tables, self.tenant)
        twin.keys = list(self.keys)
        twin.num_sealed = self.num_sealed
        twin.num_summed = self.num_summed
        twin.tail_sealed = self.tail_sealed
        twin.write_start = self.write_start
        twin.tainted = self.tainted
        return twin

    def rewind(self, position: int, index: int) -> None:
        """What is at ``position``, in block ``index``, and behind it is void, or about to change."""
        if self.tail_sealed > position:
            self.tail_sealed = -1
        if max(self.num_sealed, self.num_summed, len(self.keys)) > index:
            del self.keys[index:]
            self.num_sealed = min(self.num_sealed, index)
            self.num_summed = min(self.num_summed, index)
