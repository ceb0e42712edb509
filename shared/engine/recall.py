"""Blocks that a worker's earlier life committed, found again in memory that was kept for it.

Every block is verified against its producer's checksums before it can be found. What no longer holds is
forgotten and counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.kernels.checksum import head_checksums
from shared.kv_cache.block_pool import BlockPool
from shared.kv_cache.ledger import Ledger, LedgerEntry
from shared.telemetry import metrics
from shared.telemetry.logs import get_logger
from shared.transfer.arena import Arena

_log = get_logger(__name__)


def recall(pool: BlockPool, ledger: Ledger, ranks: Sequence[Arena], group: int, num_heads: int) -> int:
    """Make what ``ledger`` says of the blocks of ``group`` findable in the fresh ``pool``; returns how many
    blocks. ``ranks`` hold the group's ``num_heads`` kv_heads in equal shares, in order."""
    kept: dict[int, LedgerEntry] = {}
    num_bad = 0
    for block_id in range(pool.num_blocks):
        entry = ledger.read(block_id, pool.generation(block_id))
        if entry is None:
            continue
        if _sums(ranks, group, block_id, num_heads) == entry.checksums:
            kept[block_id] = entry
        else:
            ledger.clear(block_id)
            num_bad += 1
    pool.adopt(kept)
    metrics.RECALLED.inc(len(kept))
    metrics.CHECKSUM_FAILURES.labels("kept").inc(num_bad)
    _log.info("blocks of an earlier life", group=group, found=len(kept), damaged=num_bad)
    return len(kept)


def _sums(ranks: Sequence[Arena], group: int, block_id: int, num_heads: int) -> tuple[int, ...]:
    share = num_heads // len(ranks)
    return tuple(x for rank in ranks for x in head_checksums(rank.block(group, block_id), share))
