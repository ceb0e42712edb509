"""Any order of acquire, allocate, commit, fail, release and late landing, against a plain-dict model."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.errors import OutOfBlocks
from shared.kv_cache.block_pool import BlockPool
from shared.kv_cache.encoder_cache import PENDING, READY, EncoderCache

NUM_BLOCKS, ROWS_PER_BLOCK = 6, 4
HASHES = st.sampled_from("abcde")
USERS = st.sampled_from(["u", "v", "w"])


@dataclass
class Entry:
    num_rows: int
    block_ids: tuple[int, ...]
    ready: bool = False
    users: set[str] = field(default_factory=set)
    idle_since: int = 0


class EncoderCacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.cache = EncoderCache(self.pool, ROWS_PER_BLOCK)
        self.entries: dict[str, Entry] = {}
        self.quarantined: list[int] = []
        self.time = 0

    def idle(self) -> list[str]:
        names = [h for h, e in self.entries.items() if e.ready and not e.users]
        return sorted(names, key=lambda h: self.entries[h].idle_since)

    def pick(self, data: st.DataObject, *, ready: bool) -> str:
        return data.draw(st.sampled_from(sorted(h for h, e in self.entries.items() if e.ready is ready)))

    def touch(self, mm_hash: str) -> None:
        self.time += 1
        self.entries[mm_hash].idle_since = self.time

    @rule(mm_hash=HASHES, user=USERS, num_rows=st.integers(1, 14))
    def acquire_or_allocate(self, mm_hash: str, user: str, num_rows: int) -> None:
        known = self.entries.get(mm_hash)
        got = self.cache.acquire(mm_hash, user)
        if known is not None:
            assert got is not None and (got.num_rows, got.block_ids) == (known.num_rows, known.block_ids)
            assert got.state == (READY if known.ready else PENDING)
            known.users.add(user)
            return
        assert got is None
        wanted = -(-num_rows // ROWS_PER_BLOCK)
        free = NUM_BLOCKS - len(self.quarantined) - sum(len(e.block_ids) for e in self.entries.values())
        if wanted > free + sum(len(self.entries[h].block_ids) for h in self.idle()):
            with pytest.raises(OutOfBlocks):
                self.cache.allocate(mm_hash, num_rows, user)
            return
        for victim in self.idle():
            if free >= wanted:
                break
            free += len(self.entries.pop(victim).block_ids)
        entry = self.cache.allocate(mm_hash, num_rows, user)
        assert len(entry.block_ids) == wanted and entry.state == PENDING
        self.entries[mm_hash] = Entry(num_rows, entry.block_ids, users={user})

    @precondition(lambda self: any(not e.ready for e in self.entries.values()))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        mm_hash = self.pick(data, ready=False)
        assert self.cache.commit(mm_hash, 5).checksum == 5
        self.entries[mm_hash].ready = True
        self.touch(mm_hash)

    @precondition(lambda self: any(not e.ready for e in self.entries.values()))
    @rule(data=st.data(), quarantine=st.booleans())
    def fail(self, data: st.DataObject, quarantine: bool) -> None:
        mm_hash = self.pick(data, ready=False)
        blocks = self.entries.pop(mm_hash).block_ids
        assert self.cache.fail(mm_hash, quarantine=quarantine) == (blocks if quarantine else ())
        if quarantine:
            self.quarantined += blocks

    @rule(mm_hash=HASHES, user=USERS)
    def release(self, mm_hash: str, user: str) -> None:
        self.cache.release(mm_hash, user)
        entry = self.entries.get(mm_hash)
        if entry is not None and user in entry.users:
            entry.users.remove(user)
            self.touch(mm_hash)

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.quarantined)))
        self.quarantined.remove(block_id)
        self.cache.release_quarantined([block_id])

    @invariant()
    def entries_are_as_the_model_says(self) -> None:
        self.cache.check_integrity()
        assert len(self.cache) == len(self.entries)
        assert self.cache.num_rows == sum(e.num_rows for e in self.entries.values())
        for mm_hash in "abcde":
            got, entry = self.cache.get(mm_hash), self.entries.get(mm_hash)
            assert (got is None) == (entry is None)
            if got is not None and entry is not None:
                assert got.block_ids == entry.block_ids and self.cache.users(mm_hash) == entry.users

    @invariant()
    def no_block_has_two_writers(self) -> None:
        owned = [b for e in self.entries.values() for b in e.block_ids] + self.quarantined
        assert len(owned) == len(set(owned))
        assert self.pool.num_quarantined == len(self.quarantined)
        assert self.pool.num_free == NUM_BLOCKS - len(owned)

    def teardown(self) -> None:
        for mm_hash, entry in list(self.entries.items()):
            for user in list(entry.users):
                self.cache.release(mm_hash, user)
            if not entry.ready:
                self.cache.fail(mm_hash, quarantine=False)
        self.cache.release_quarantined(self.quarantined)
        self.cache.allocate("all", NUM_BLOCKS * ROWS_PER_BLOCK, "last")
        self.cache.check_integrity()


TestEncoderCacheMachine = EncoderCacheMachine.TestCase
TestEncoderCacheMachine.settings = settings(
    derandomize=True, max_examples=100, stateful_step_count=40, deadline=None, database=None
)
