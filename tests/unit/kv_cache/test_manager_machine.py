"""Any interleaving of what an engine does to the manager, over a model of the memory itself.

Steps with a second one planned before the first's results, prefix hits, forks and copy-on-write, pulls
that succeed, fail or land late, aborts in flight, leases that are renewed or expire, cache resets; with block
hashes whole and cut to a few bits. At the end nothing is left over.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.clock import ManualClock
from shared.errors import OutOfBlocks
from shared.kv_cache.leases import LeaseTable
from shared.types.request import MediaItem
from shared.types.transfer import BlockRef
from tests.unit.kv_cache.kv_builders import make_manager
from tests.unit.kv_cache.kv_world import BLOCK_SIZE, Model, Plan, World

NUM_BLOCKS = (16, 14)  # the second runs out first: what the first did then must be undone
TOKENS = st.sampled_from([0, 0, 0, 1])
PROMPTS = st.builds(
    lambda length, tail: [0, 1, 0, 0, 0, 1, 0, 0][:length] + tail,
    st.integers(2, 8),
    st.lists(TOKENS, min_size=1, max_size=2),
)
CAT, DOG, LATER = MediaItem("cat", 1, 2), MediaItem("dog", 1, 2), MediaItem("cat", 2, 1)
MEDIA = st.sampled_from([(), (), (), (CAT,), (DOG,), (LATER,)])
SALTS = st.sampled_from(["", "", "tenant"])
RARELY = st.sampled_from([False, False, False, True])


class ManagerMachine(RuleBasedStateMachine):
    @initialize(bits=st.sampled_from([256, 8, 2, 1]))
    def start(self, bits: int) -> None:
        self.manager = make_manager(NUM_BLOCKS, block_size=BLOCK_SIZE, bits=bits)
        self.world = World(NUM_BLOCKS)
        self.open: dict[str, Model] = {}
        self.late: list[tuple[int, int]] = []  # (group, block id) of transfers that outlived their owner
        self.clock = ManualClock()
        self.leases = LeaseTable(self.clock, ttl_s=3)
        self.pinned: dict[str, tuple[int, list[BlockRef]]] = {}
        self.count = 0

    def new_key(self) -> str:
        self.count += 1
        return f"k{self.count}"

    def pick(self, data: st.DataObject, kind: str) -> str:
        return data.draw(st.sampled_from(self.keys(kind)))

    def keys(self, kind: str) -> list[str]:
        return [key for key, seq in self.open.items() if seq.kind == kind]

    def snapshot(self) -> object:
        tables = {key: self.manager.table(key) for key in self.open}
        return tables, self.manager.num_free(0), self.manager.num_free(1)

    def reserve(self, key: str, num_tokens: int, writable_from: int) -> bool:
        """Reserve, and copy as the device would; False when there are too few blocks."""
        before = self.snapshot()
        try:
            copies = self.manager.reserve(key, num_tokens, writable_from=writable_from)
        except OutOfBlocks:
            assert self.snapshot() == before, "a failed reservation changes nothing"
            return False
        for copy in copies:
            blocks = self.world.memory[copy.group]
            blocks[copy.dst][:] = blocks[copy.src]
        return True

    # Requests that compute here.

    @precondition(lambda self: len(self.open) < 5)
    @rule(data=st.data(), prompt=PROMPTS, media=MEDIA, salt=SALTS)
    def begin(self, data: st.DataObject, prompt: list[int], media: tuple[MediaItem, ...], salt: str) -> None:
        key = self.new_key()
        cached = self.manager.open(key, prompt, media, salt, "", len(prompt) - 1)
        assert cached % BLOCK_SIZE == 0 and cached < len(prompt)
        self.open[key] = Model(salt, media, list(prompt), computed=cached)
        self.step(data, key)

    @precondition(lambda self: self.keys("idle") or self.keys("stepping"))
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        keys = self.keys("idle") + [k for k in self.keys("stepping") if len(self.open[k].plans) < 2]
        for key in keys[:3]:
            self.step(data, key)

    def step(self, data: st.DataObject, key: str) -> None:
        """Plan and run one step; its results arrive now or later."""
        seq = self.open[key]
        stop = min(seq.computed + data.draw(st.integers(1, 9)), len(seq.tokens))
        if not self.reserve(key, stop, seq.computed):
            return
        seals = self.manager.sealable(key, stop, tail=data.draw(st.booleans()))
        self.world.write(self.manager, key, seq, range(seq.computed, stop))
        checksums = {(g, b): self.world.checksum(g, b) for g, _, b in seals}
        sampled = [data.draw(TOKENS)] if stop == len(seq.tokens) else []
        seq.plans.append(Plan(stop, checksums, sampled))
        seq.computed = stop
        seq.tokens += sampled
        while seq.plans and not data.draw(RARELY):
            self.result(key)

    def result(self, key: str) -> None:
        plan = self.open[key].plans.pop(0)
        self.manager.append(key, plan.sampled)
        for block in self.manager.commit(key, plan.num_computed, plan.checksums):
            assert block.block_id == self.manager.table(key)[block.group][block.index]
            assert block.ref.checksums == self.world.checksum(block.group, block.block_id)

    @precondition(lambda self: self.keys("stepping"))
    @rule(data=st.data())
    def results_arrive(self, data: st.DataObject) -> None:
        self.result(self.pick(data, "stepping"))

    @precondition(lambda self: self.keys("idle") and len(self.open) < 6)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        key = self.pick(data, "idle")
        child, seq = self.new_key(), self.open[key]
        self.manager.fork(key, child)
        self.open[child] = Model(seq.salt, seq.media, list(seq.tokens), seq.computed)
        self.step(data, data.draw(st.sampled_from([key, child])))

    @precondition(lambda self: self.keys("idle"))
    @rule(data=st.data(), invalid=RARELY)
    def close(self, data: st.DataObject, invalid: bool) -> None:
        key = self.pick(data, "idle")
        if invalid:
            self.manager.invalidate(key)
        assert self.manager.close(key) == {}
        del self.open[key]

    @precondition(lambda self: self.count % 7 == 6)
    @rule()
    def reset(self) -> None:
        self.count += 1
        self.manager.reset_prefix_cache()
        assert self.manager.num_cached_tokens == 0

    # Requests whose prompt is pulled from another worker.

    @precondition(lambda self: len(self.open) < 5)
    @rule(prompt=PROMPTS, salt=SALTS)
    def attach(self, prompt: list[int], salt: str) -> None:
        key = self.new_key()
        cached = self.manager.open(key, prompt, (), salt, "", len(prompt) - 1)
        if not self.reserve(key, len(prompt), cached):
            self.manager.close(key)
            return
        indices = range(cached // BLOCK_SIZE, self.manager.table_len(key))
        flying = {(group, index) for group in range(2) for index in indices}
        self.open[key] = Model(salt, (), list(prompt), cached, flying=flying)

    @precondition(lambda self: self.keys("flying"))
    @rule(data=st.data(), count=st.integers(1, 9))
    def land(self, data: st.DataObject, count: int) -> None:
        key = self.pick(data, "flying")
        seq = self.open[key]
        cells = self.world.cells(seq, len(seq.tokens))
        for group, index in data.draw(st.permutations(sorted(seq.flying)))[:count]:
            block_id = self.manager.table(key)[group][index]
            self.world.land(group, block_id, cells[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
            seq.flying.remove((group, index))
            seq.pulled[group, block_id] = self.world.checksum(group, block_id)
        if not seq.flying:
            self.manager.commit(key, len(seq.tokens), seq.pulled)
            seq.computed = len(seq.tokens)
            seq.tokens.append(0)  # the prefill worker's first token
            self.manager.append(key, [0])

    @precondition(lambda self: self.keys("flying"))
    @rule(data=st.data())
    def pull_fails(self, data: st.DataObject) -> None:
        key = self.pick(data, "flying")
        group, index = data.draw(st.sampled_from(sorted(self.open[key].flying)))
        before = self.snapshot()
        try:
            stale = self.manager.replace(key, group, [index])
        except OutOfBlocks:
            assert self.snapshot() == before
            return
        self.late += [(group, block_id) for block_id in stale]

    @precondition(lambda self: self.keys("flying"))
    @rule(data=st.data())
    def abort_in_flight(self, data: st.DataObject) -> None:
        self.abort(self.pick(data, "flying"))

    def abort(self, key: str) -> None:
        flying = self.open.pop(key).flying
        by_group = {group: [i for g, i in flying if g == group] for group in range(2)}
        for group, ids in self.manager.close(key, by_group).items():
            self.late += [(group, block_id) for block_id in ids]

    @precondition(lambda self: self.late)
    @rule(data=st.data(), settled=st.booleans())
    def land_late(self, data: st.DataObject, settled: bool) -> None:
        group, block_id = data.draw(st.sampled_from(self.late))
        self.world.land(group, block_id)
        if settled:
            self.late.remove((group, block_id))
            self.manager.release_quarantined(group, [block_id])

    # Handoffs under lease.

    @precondition(lambda self: self.keys("idle") and len(self.pinned) < 3)
    @rule(data=st.data(), group=st.integers(0, 1), ttl_s=st.integers(1, 4))
    def hand_off(self, data: st.DataObject, group: int, ttl_s: int) -> None:
        key = self.pick(data, "idle")
        refs = self.manager.committed(key, group, 0, self.open[key].computed // BLOCK_SIZE)
        self.manager.pin(group, [ref.block_id for ref in refs])
        lease = self.new_key()
        self.leases.grant(lease, ttl_s)
        self.pinned[lease] = (group, refs)

    def unpin(self, lease: str) -> None:
        group, refs = self.pinned.pop(lease)
        self.manager.unpin(group, [ref.block_id for ref in refs])

    @precondition(lambda self: self.pinned)
    @rule(data=st.data(), release=st.booleans())
    def renew_or_release(self, data: st.DataObject, release: bool) -> None:
        lease = data.draw(st.sampled_from(sorted(self.pinned)))
        if release:
            assert self.leases.release(lease)
            self.unpin(lease)
        else:
            assert self.leases.renew(lease)

    @precondition(lambda self: self.pinned)
    @rule(seconds=st.integers(1, 3))
    def time_passes(self, seconds: int) -> None:
        self.clock.advance(seconds)
        for lease in self.leases.expired():
            self.unpin(lease)
        assert len(self.leases) == len(self.pinned)

    # What must always hold.

    @invariant()
    def every_reader_reads_its_own(self) -> None:
        for key, seq in self.open.items():
            self.world.assert_reads(self.manager, key, seq)
        for group, refs in self.pinned.values():
            self.world.assert_pinned(self.manager, group, refs)

    @invariant()
    def checksums_hold(self) -> None:
        self.world.assert_checksums_hold(self.manager)

    @invariant()
    def blocks_add_up(self) -> None:
        manager = self.manager
        manager.check_integrity()
        for group, total in enumerate(NUM_BLOCKS):
            held = {b for table in (manager.table(k)[group] for k in self.open) for b in table}
            held |= {ref.block_id for g, refs in self.pinned.values() if g == group for ref in refs}
            late = {b for g, b in self.late if g == group}
            assert manager.num_used(group) == len(held) and manager.num_quarantined(group) == len(late - held)
            assert manager.num_free(group) == total - len(held | late)

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for key in self.keys("flying"):
            self.abort(key)
        for key in self.open:
            self.manager.close(key)
        for group, block_id in self.late:
            self.manager.release_quarantined(group, [block_id])
        for lease in list(self.pinned):
            self.unpin(lease)
        self.manager.check_integrity()
        assert self.manager.num_free() == self.manager.num_blocks(), "leak"


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(
    derandomize=True, max_examples=120, stateful_step_count=50, deadline=None, database=None
)
