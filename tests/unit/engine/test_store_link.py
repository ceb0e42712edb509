"""A worker's side of the kv_store when requests end in the middle of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shared.clock import ManualClock
from shared.engine.desk import PullDesk
from shared.engine.inbox import Inbox
from shared.engine.store_link import RemoteStoreLink
from shared.engine.tier_costs import TierCosts
from shared.kv_cache.block_hash import BlockHasher
from shared.kv_cache.manager import CommittedBlock, KVCacheManager
from shared.kv_cache.segments import WantedBlock
from shared.scheduler.sequence import Sequence
from shared.tiering.nodes import NodeLease
from shared.tiering.pool import PoolHit
from shared.transfer.handoff import PullOutcome
from shared.types.identity import IdentityKey
from shared.types.kv import KVCacheSpec, KVGroupSpec
from shared.types.request import GenerationRequest, SamplingParams
from shared.types.store import tenant_of
from shared.types.transfer import AgentInfo, BlockRef, KvTransferParams
from shared.types.worker import AGGREGATED
from tests.unit.engine.test_landing import RecordingPuller

STORE, OTHER = AgentInfo("store", "i", 1, (), ()), AgentInfo("other", "i", 1, (), ())


def run_of(producer: AgentInfo, first: int, *block_ids: int) -> KvTransferParams:
    refs = tuple(BlockRef(block_id, 1, (block_id,)) for block_id in block_ids)
    return KvTransferParams("lease", producer, 0, first, refs)


HIT = PoolHit(2, (run_of(STORE, 0, 0, 1),), (NodeLease("store:1", "lease"),))


class ScriptedCalls:
    """Looks up what the test says and remembers the rest."""

    def __init__(self) -> None:
        self.usable = True
        self.looked_up: list[Callable[[PoolHit], None]] = []
        self.wanted: list[tuple[WantedBlock, ...]] = []
        self.tenants: list[str] = []
        self.released: list[PoolHit] = []
        self.offered: list[tuple[CommittedBlock, ...]] = []
        self.kept: list[Callable[[int], None]] = []

    def lookup(self, wanted: tuple[WantedBlock, ...], tenant: str, done: Callable[[PoolHit], None]) -> None:
        self.wanted.append(wanted)
        self.tenants.append(tenant)
        self.looked_up.append(done)

    def release(self, hit: PoolHit) -> None:
        self.released.append(hit)

    def offer(self, blocks: tuple[CommittedBlock, ...], done: Callable[[int], None]) -> None:
        self.offered.append(blocks)
        self.kept.append(done)


class Bench:
    """A link over real bookkeeping, with a scripted store and puller."""

    def __init__(self, *, prefix_caching: bool = True) -> None:
        spec = KVCacheSpec(4, (KVGroupSpec(1, 1, 1, "uint64"),))
        hasher = BlockHasher(IdentityKey("m", "r", "t", "uint64"), 4)
        self.kv = KVCacheManager(spec, [8], hasher, prefix_caching=prefix_caching)
        self.inbox = Inbox()
        desk = PullDesk(self.inbox)
        self.puller = RecordingPuller()
        desk.bind(self.puller)
        self.desk = desk
        self.calls = ScriptedCalls()
        self.clock = ManualClock(5.0)
        self.costs = TierCosts(self.clock, 16)
        self.link = RemoteStoreLink(
            self.calls,
            self.kv,
            hasher,
            desk,
            self.inbox,
            costs=self.costs,
            deadline_s=1.0,
            max_offered_blocks=8,
        )


def test_a_request_that_ends_while_blocks_of_the_store_land_gives_their_lease_back() -> None:
    bench = Bench()
    request = GenerationRequest("a", "m", tuple(range(9)), 9, SamplingParams(4))
    sequence = Sequence(request, 0, AGGREGATED, 1)
    loaded: list[bool] = []
    bench.link.load(sequence, lambda: loaded.append(True))
    bench.calls.looked_up[0](HIT)
    bench.inbox.run()
    assert len(bench.puller.pulls) == 1
    bench.link.forget(sequence)
    assert bench.calls.released == [HIT]
    bench.desk.deliver(
        PullOutcome(bench.puller.pulls[0].pull_id, (False,) * 2, "cancelled", True, 0, 0.0, "")
    )
    bench.inbox.run()
    assert not loaded and bench.calls.released == [HIT]
    assert (bench.kv.num_used(), bench.kv.num_quarantined()) == (0, 0)


def test_the_stores_hear_for_whom_blocks_are_wanted() -> None:
    bench = Bench()
    for name, salt in (("a", "salt"), ("b", "")):
        request = GenerationRequest(name, "m", tuple(range(9)), 9, SamplingParams(4), cache_salt=salt)
        bench.link.load(Sequence(request, 0, AGGREGATED, 1), lambda: None)
    assert bench.calls.tenants == [tenant_of("salt"), ""] and tenant_of("salt")


def test_a_hit_of_two_stores_lands_in_one_table_and_all_its_leases_go_back() -> None:
    bench = Bench()
    bench.kv.open("warm", list(range(4)), (), "", "", 0)
    bench.kv.reserve("warm", 4, writable_from=0)
    bench.kv.commit("warm", 4, {(0, bench.kv.table("warm")[0][0]): (1,)})
    bench.kv.close("warm")
    sequence = Sequence(
        GenerationRequest("a", "m", tuple(range(17)), 17, SamplingParams(4)), 0, AGGREGATED, 1
    )
    loaded: list[bool] = []
    bench.link.load(sequence, lambda: loaded.append(True))
    (wanted,) = bench.calls.wanted
    assert [want.block.token_ids[0] for want in wanted] == [4, 8, 12], "the first block is here already"
    hit = PoolHit(
        3,
        (run_of(STORE, 0, 30), run_of(OTHER, 1, 40, 41)),
        (NodeLease("store:1", "x"), NodeLease("other:1", "y")),
    )
    bench.calls.looked_up[0](hit)
    bench.inbox.run()
    table = bench.kv.table(sequence.key)[0]
    assert [
        (pull.producer, [(b.remote.block_id, b.local_block) for b in pull.blocks])
        for pull in bench.puller.pulls
    ] == [(STORE, [(30, table[1])]), (OTHER, [(40, table[2]), (41, table[3])])]
    for pull in bench.puller.pulls:
        assert not loaded and not bench.calls.released
        ok = (True,) * len(pull.blocks)
        bench.desk.deliver(PullOutcome(pull.pull_id, ok, "", True, 8, 0.1, "shm"))
        bench.inbox.run()
    assert loaded == [True] and bench.calls.released == [hit]
    assert sequence.num_cached == 16
    bench.kv.close(sequence.key)
    bench.kv.check_integrity()


def test_a_second_store_that_dies_in_the_middle_leaves_what_the_first_one_gave() -> None:
    bench = Bench()
    sequence = Sequence(
        GenerationRequest("a", "m", tuple(range(17)), 17, SamplingParams(4)), 0, AGGREGATED, 1
    )
    bench.link.load(sequence, lambda: None)
    hit = PoolHit(4, (run_of(STORE, 0, 30, 31), run_of(OTHER, 2, 40, 41)), (NodeLease("store:1", "x"),))
    bench.calls.looked_up[0](hit)
    bench.inbox.run()
    lost, whole = bench.puller.pulls[1], bench.puller.pulls[0]
    bench.desk.deliver(PullOutcome(lost.pull_id, (False, False), "peer_lost", True, 0, 0.1, "shm"))
    bench.desk.deliver(PullOutcome(whole.pull_id, (True, True), "", True, 8, 0.1, "shm"))
    bench.inbox.run()
    assert sequence.num_cached == 8 and bench.calls.released == [hit]


def test_with_no_store_that_answers_nothing_is_asked_or_offered() -> None:
    bench = Bench()
    bench.calls.usable = False
    sequence = Sequence(GenerationRequest("a", "m", tuple(range(9)), 9, SamplingParams(4)), 0, AGGREGATED, 1)
    loaded: list[bool] = []
    bench.link.load(sequence, lambda: loaded.append(True))
    assert loaded == [True] and not bench.calls.looked_up and not sequence.kv_open
    bench.kv.open("b", list(range(4)), (), "", "", 0)
    bench.kv.reserve("b", 4, writable_from=0)
    bench.link.offer(tuple(bench.kv.commit("b", 4, {(0, bench.kv.table("b")[0][0]): (1,)})))
    assert not bench.calls.offered
    bench.kv.close("b")
    bench.kv.check_integrity()


def test_blocks_that_went_with_their_request_are_not_offered() -> None:
    for prefix_caching, offers in ((True, 1), (False, 0)):
        bench = Bench(prefix_caching=prefix_caching)
        bench.kv.open("a", list(range(4)), (), "", "", 0)
        bench.kv.reserve("a", 4, writable_from=0)
        committed = tuple(bench.kv.commit("a", 4, {(0, bench.kv.table("a")[0][0]): (1,)}))
        bench.kv.close("a")
        bench.link.offer(committed)
        assert len(bench.calls.offered) == offers
        bench.kv.check_integrity()


def test_a_prefix_is_loaded_until_computing_is_measured_to_be_faster() -> None:
    bench = Bench()
    asked: list[int] = []

    def serve(name: str, load_s: float) -> None:
        request = GenerationRequest(name, "m", tuple(range(9)), 9, SamplingParams(4), cache_salt=name)
        sequence = Sequence(request, 0, AGGREGATED, 1)
        before = len(bench.calls.looked_up)
        bench.link.load(sequence, lambda: None)
        asked.append(len(bench.calls.looked_up) - before)
        if asked[-1]:
            bench.clock.advance(load_s)
            bench.calls.looked_up[-1](HIT)
            bench.inbox.run()
            pull = bench.puller.pulls[-1]
            bench.desk.deliver(PullOutcome(pull.pull_id, (True, True), "", True, 64, load_s, "shm"))
            bench.inbox.run()
        bench.kv.close(sequence.key)

    for step in range(6):
        bench.costs.stepped(8, 0.5)
        serve(f"fast-{step}", 0.01)
    assert asked == [1] * 6
    asked.clear()
    for step in range(20):
        bench.costs.stepped(8, 0.5)
        serve(f"slow-{step}", 5.0)
    assert 0 in asked and asked[-1] == 0, "the link got slow: compute"
    bench.clock.advance(61.0)
    bench.costs.stepped(8, 0.5)
    serve("again", 0.01)
    assert asked[-1] == 1, "what was not measured for long is tried again"


def test_what_computing_costs_is_counted_in_whole_steps() -> None:
    costs = TierCosts(ManualClock(1.0), 16)
    assert costs.compute_s(10) is None and costs.prefers_loading(10)
    for tokens in (1, 16, 8, 4, 16, 2):
        costs.stepped(tokens, 0.1 + 0.01 * tokens)
    assert costs.compute_s(40) == pytest.approx(2 * 0.26 + 0.18)
    assert costs.compute_s(32) == pytest.approx(2 * 0.26)


def test_of_a_prefix_that_was_offered_the_tail_goes_first() -> None:
    bench = Bench()
    tokens = list(range(12))
    bench.kv.open("a", tokens, (), "", "", 0)
    bench.kv.reserve("a", 12, writable_from=0)
    blocks = bench.kv.commit("a", 12, {(0, block_id): (1,) for block_id in bench.kv.table("a")[0]})
    bench.link.offer(tuple(blocks))
    bench.kv.close("a")
    bench.calls.kept[0](3)
    bench.inbox.run()
    bench.kv.open("b", list(range(100, 124)), (), "", "", 0)
    bench.kv.reserve("b", 24, writable_from=0)  # six of the eight blocks
    assert bench.kv.open("c", [*tokens, 0], (), "", "", 12) == 8
