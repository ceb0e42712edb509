"""What memory says of its blocks after its owner's death: all of what was committed, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.kv_cache.block_pool import BlockPool
from shared.kv_cache.ledger import Ledger, LedgerEntry, slot_bytes

BLOCK_SIZE, HEADS, BLOCKS = 4, 2, 6
SLOT = slot_bytes(BLOCK_SIZE, HEADS)
MEDIA = (("ab" * 32, -3), ("cd" * 32, 2))


def entry(number: int, parent: bytes = b"root", media: tuple[tuple[str, int], ...] = ()) -> LedgerEntry:
    ids = tuple(range(4_000_000_000 + number, 4_000_000_000 + number + BLOCK_SIZE))
    return LedgerEntry(bytes([number]) * 32, parent, ids, media, (2**64 - 1, number))


def make() -> tuple[bytearray, Ledger]:
    memory = bytearray(BLOCKS * SLOT)
    return memory, Ledger(memoryview(memory), BLOCKS, SLOT)


def test_what_was_written_is_read_for_its_generation_alone() -> None:
    _, ledger = make()
    ledger.write(2, 7, entry(1, media=MEDIA))
    assert ledger.read(2, 7) == entry(1, media=MEDIA)
    assert ledger.read(2, 8) is None and ledger.read(1, 7) is None
    ledger.clear(2)
    assert ledger.read(2, 7) is None


def test_the_largest_usual_record_fits_and_a_larger_one_leaves_nothing_old() -> None:
    _, ledger = make()
    ledger.write(0, 1, entry(1))
    ledger.write(0, 2, entry(2, media=MEDIA * 5))
    assert ledger.read(0, 1) is None and ledger.read(0, 2) is None


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, SLOT - 1), flip=st.integers(1, 255))
def test_a_damaged_record_is_the_same_or_nothing(position: int, flip: int) -> None:
    memory, ledger = make()
    ledger.write(0, 7, entry(1, media=MEDIA))
    memory[position] ^= flip
    assert ledger.read(0, 7) in (None, entry(1, media=MEDIA))


def test_slots_are_bounded() -> None:
    _, ledger = make()
    with pytest.raises(IndexError):
        ledger.read(BLOCKS, 0)
    with pytest.raises(ValueError, match="too small"):
        Ledger(memoryview(bytearray(SLOT)), 2, SLOT)


class Pool:
    """A pool that writes its ledger, and the next life's pool over the same memory."""

    def __init__(self) -> None:
        self.memory, self.ledger = make()
        self.generations = [0] * BLOCKS
        self.pool = BlockPool(BLOCKS, self.generations, ledger=self.ledger)

    def publish(self, number: int, parent: bytes = b"root") -> int:
        [block_id] = self.pool.allocate(1)
        wanted = entry(number, parent)
        self.pool.set_checksums(block_id, wanted.checksums)
        self.pool.publish(block_id, wanted.block_hash, parent, wanted.token_ids)
        return block_id

    def next_life(self) -> BlockPool:
        ledger = Ledger(memoryview(self.memory), BLOCKS, SLOT)
        pool = BlockPool(BLOCKS, self.generations, ledger=ledger)
        read = {b: e for b in range(BLOCKS) if (e := ledger.read(b, self.generations[b]))}
        pool.adopt(read)
        pool.check_integrity()
        return pool


def found(pool: BlockPool, number: int, parent: bytes = b"root") -> int | None:
    wanted = entry(number, parent)
    return pool.lookup(wanted.block_hash, parent, wanted.token_ids)


def test_the_next_life_finds_a_whole_prefix_again() -> None:
    world = Pool()
    first = world.publish(1)
    second = world.publish(2, entry(1).block_hash)
    pool = world.next_life()
    assert found(pool, 1) == first
    assert found(pool, 2, entry(1).block_hash) == second
    assert pool.num_free == BLOCKS and pool.checksums(second) == entry(2).checksums


def test_what_was_evicted_reused_or_never_summed_is_not_found() -> None:
    world = Pool()
    reused = world.publish(1)
    world.pool.free((reused,))
    world.pool.unpublish((reused,))
    [again] = world.pool.allocate(1)
    assert again == reused
    [plain] = world.pool.allocate(1)
    world.pool.publish(plain, entry(3).block_hash, b"root", entry(3).token_ids)
    pool = world.next_life()
    assert pool.num_published == 0


def test_a_block_handed_out_again_at_the_moment_of_death_is_not_found() -> None:
    world = Pool()
    block_id = world.publish(1)
    world.generations[block_id] += 1  # raised before anything is written
    assert world.next_life().num_published == 0


def test_adopted_blocks_are_evicted_and_written_down_like_others() -> None:
    world = Pool()
    world.publish(1)
    pool = world.next_life()
    pool.allocate(BLOCKS)
    assert pool.num_published == 0
    assert all(world.ledger.read(b, world.generations[b]) is None for b in range(BLOCKS))
