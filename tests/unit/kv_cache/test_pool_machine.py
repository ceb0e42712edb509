"""Any order of allocate, share, free, publish, quarantine and release, against a plain-dict model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.errors import OutOfBlocks
from shared.kv_cache.block_pool import BlockPool

NUM_BLOCKS = 6
CONTENTS = [(parent, ids) for parent in (b"p", b"q") for ids in ((1,), (2,))]


@dataclass
class Block:
    """What the model knows of one block."""

    refs: int = 0
    holds: int = 0
    generation: int = 0
    content: tuple[bytes, tuple[int, ...]] | None = None
    checksums: tuple[int, ...] = ()
    freed_at: int = 0


@dataclass
class Model:
    blocks: list[Block] = field(default_factory=lambda: [Block() for _ in range(NUM_BLOCKS)])
    time: int = 0

    def ids(self, state: str) -> list[int]:
        return [i for i, b in enumerate(self.blocks) if self.state(b) == state]

    @staticmethod
    def state(block: Block) -> str:
        if block.refs:
            return "used"
        if block.holds:
            return "quarantined"
        return "plain" if block.content is None else "cached"

    def drop(self, block_id: int) -> None:
        self.time += 1
        self.blocks[block_id].refs -= 1
        self.blocks[block_id].freed_at = self.time


class PoolMachine(RuleBasedStateMachine):
    """All contents share one hash: only the comparison of contents keeps them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.pool = BlockPool(NUM_BLOCKS)

    def pick(self, data: st.DataObject, *states: str) -> int:
        return data.draw(st.sampled_from(sorted(i for s in states for i in self.model.ids(s))))

    @rule(n=st.integers(0, 4))
    def allocate(self, n: int) -> None:
        plain, cached = self.model.ids("plain"), self.model.ids("cached")
        if n > len(plain) + len(cached):
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(n)
            return
        got = self.pool.allocate(n)
        cached.sort(key=lambda i: self.model.blocks[i].freed_at)
        assert set(got[: len(plain)]) <= set(plain) and len(set(got)) == n
        assert got[len(plain) :] == cached[: max(0, n - len(plain))]
        for block_id in got:
            generation = self.model.blocks[block_id].generation + 1
            self.model.blocks[block_id] = Block(refs=1, generation=generation)

    @precondition(lambda self: self.model.ids("used") + self.model.ids("cached"))
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block_id = self.pick(data, "used", "cached")
        self.pool.share([block_id])
        self.model.blocks[block_id].refs += 1

    @precondition(lambda self: self.model.ids("used"))
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        owned = [i for i in self.model.ids("used") for _ in range(self.model.blocks[i].refs)]
        ids = data.draw(st.permutations(owned))[: data.draw(st.integers(1, 3))]
        self.pool.free(ids)
        for block_id in reversed(ids):
            self.model.drop(block_id)

    @precondition(lambda self: self.model.ids("used"))
    @rule(data=st.data(), content=st.sampled_from(CONTENTS))
    def publish(self, data: st.DataObject, content: tuple[bytes, tuple[int, ...]]) -> None:
        block_id = self.pick(data, "used")
        block = self.model.blocks[block_id]
        if block.holds or block.content not in (None, content):
            with pytest.raises(ValueError, match="block"):
                self.pool.publish(block_id, b"h", *content)
            return
        self.pool.publish(block_id, b"h", *content)
        block.content = content

    @precondition(lambda self: self.model.ids("used"))
    @rule(data=st.data(), value=st.integers(0, 9))
    def checksum(self, data: st.DataObject, value: int) -> None:
        block_id = self.pick(data, "used")
        self.pool.set_checksums(block_id, (value,))
        self.model.blocks[block_id].checksums = (value,)

    @rule(block_id=st.integers(0, NUM_BLOCKS - 1))
    def unpublish(self, block_id: int) -> None:
        self.pool.unpublish([block_id])
        self.model.blocks[block_id].content = None

    @precondition(lambda self: self.model.ids("used"))
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        block_id = self.pick(data, "used")
        self.pool.quarantine([block_id])
        self.model.blocks[block_id].holds += 1
        self.model.blocks[block_id].content = None
        self.model.drop(block_id)

    @precondition(lambda self: any(b.holds for b in self.model.blocks))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = [i for i, b in enumerate(self.model.blocks) if b.holds]
        block_id = data.draw(st.sampled_from(held))
        self.pool.release_quarantined([block_id])
        self.model.blocks[block_id].holds -= 1

    @rule(data=st.data(), what=st.sampled_from(["share", "free", "quarantine", "release_quarantined"]))
    def misuse_changes_nothing(self, data: st.DataObject, what: str) -> None:
        states = {"share": {"plain", "quarantined"}}.get(what, {"plain", "cached", "quarantined"})
        wrong = [i for i, b in enumerate(self.model.blocks) if self.model.state(b) in states]
        if what == "release_quarantined":
            wrong = [i for i, b in enumerate(self.model.blocks) if not b.holds]
        if wrong:
            misuse: Any = getattr(self.pool, what)
            with pytest.raises(ValueError, match="block"):
                misuse([data.draw(st.sampled_from(wrong))])

    @invariant()
    def numbers_add_up(self) -> None:
        pool, model = self.pool, self.model
        pool.check_integrity()
        assert pool.num_free == len(model.ids("plain") + model.ids("cached"))
        assert pool.num_used == len(model.ids("used"))
        assert pool.num_quarantined == len(model.ids("quarantined"))
        assert pool.num_free + pool.num_used + pool.num_quarantined == NUM_BLOCKS
        assert pool.num_published == sum(b.content is not None for b in model.blocks)

    @invariant()
    def blocks_are_as_the_model_says(self) -> None:
        for block_id, block in enumerate(self.model.blocks):
            assert self.pool.ref_count(block_id) == block.refs
            assert self.pool.generation(block_id) == block.generation
            assert self.pool.checksums(block_id) == block.checksums
            assert self.pool.is_held(block_id) == (block.holds > 0)

    @invariant()
    def a_hit_is_never_wrong_and_never_missed(self) -> None:
        for content in CONTENTS:
            found = self.pool.lookup(b"h", *content)
            holders = [i for i, b in enumerate(self.model.blocks) if b.content == content]
            assert found in holders if holders else found is None


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    derandomize=True, max_examples=120, stateful_step_count=40, deadline=None, database=None
)
