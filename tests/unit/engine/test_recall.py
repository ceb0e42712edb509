"""Blocks of an earlier life: whole ones are found again, damaged ones are counted and forgotten."""

from __future__ import annotations

import pytest

from shared.engine.recall import recall
from shared.kernels.checksum import head_checksums
from shared.kv_cache.block_pool import BlockPool
from shared.kv_cache.ledger import Ledger, LedgerEntry, slot_bytes
from shared.telemetry import metrics
from shared.transfer.arena import Arena

BLOCKS, HEADS, BLOCK_SIZE = 4, 4, 4
SLOT = slot_bytes(BLOCK_SIZE, HEADS)


def entry(number: int, checksums: tuple[int, ...]) -> LedgerEntry:
    return LedgerEntry(bytes([number]) * 32, b"root", (number,) * BLOCK_SIZE, (), checksums)


def failures() -> float:
    return metrics.CHECKSUM_FAILURES.labels("kept")._value.get()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_whole_blocks_are_found_and_damaged_ones_counted(num_ranks: int) -> None:
    share = HEADS // num_ranks
    ranks = [
        Arena.create(f"kv.{rank}", (BLOCKS,), (share * 64,), "a" * 32, ledger_bytes=BLOCKS * SLOT)
        for rank in range(num_ranks)
    ]
    ledger = Ledger(ranks[0].ledger(), BLOCKS, SLOT)
    for block_id in range(3):
        sums: tuple[int, ...] = ()
        for number, rank in enumerate(ranks):
            rank.generations(0)[block_id] = 5
            rank.block(0, block_id)[:] = bytes([block_id, number]) * (share * 32)
            sums += head_checksums(rank.block(0, block_id), share)
        ledger.write(block_id, 5, entry(block_id, sums))
    ranks[-1].block(0, 1)[-1] ^= 1
    pool, before = BlockPool(BLOCKS, ranks[0].generations(0), ledger=ledger), failures()
    assert recall(pool, ledger, ranks, 0, HEADS) == 2
    assert failures() == before + 1
    found = [pool.lookup(bytes([n]) * 32, b"root", (n,) * BLOCK_SIZE) for n in range(3)]
    assert found == [0, None, 2] and pool.num_free == BLOCKS
    assert ledger.read(1, 5) is None
    pool.check_integrity()
    for rank in ranks:
        rank.close()
