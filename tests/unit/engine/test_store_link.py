"""A worker's side of the kv_store when requests end in the middle of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shared.clock import ManualClock
from shared.engine.desk import PullDesk
from shared.engine.inbox import Inbox
from shared.engine.store_link import RemoteStoreLink
from shared.engine.tier_costs import TierCosts
from shared.kv_cache.block_hash import BlockHasher, HashedBlock
from shared.kv_cache.manager import CommittedBlock, KVCacheManager
from shared.scheduler.sequence import Sequence
from shared.transfer.handoff import PullOutcome
from shared.types.identity import IdentityKey
from shared.types.kv import KVCacheSpec, KVGroupSpec
from shared.types.request import GenerationRequest, SamplingParams
from shared.types.store import StoreHit
from shared.types.transfer import AgentInfo, BlockRef, KvTransferParams
from shared.types.worker import AGGREGATED
from tests.unit.engine.test_landing import RecordingPuller

STORE = AgentInfo("store", "i", 1, (), ())


class ScriptedCalls:
    """Looks up what the test says and remembers the rest."""

    def __init__(self) -> None:
        self.looked_up: list[Callable[[StoreHit], None]] = []
        self.released: list[str] = []
        self.offered: list[tuple[CommittedBlock, ...]] = []

    def lookup(self, wanted: tuple[HashedBlock, ...], done: Callable[[StoreHit], None]) -> None:
        self.looked_up.append(done)

    def release(self, lease_id: str) -> None:
        self.released.append(lease_id)

    def offer(self, blocks: tuple[CommittedBlock, ...], done: Callable[[int], None]) -> None:
        self.offered.append(blocks)


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
    run = KvTransferParams("lease", STORE, 0, 0, (BlockRef(0, 1, (1,)), BlockRef(1, 1, (1,))))
    bench.calls.looked_up[0](StoreHit("lease", 5.0, 2, (run,)))
    bench.inbox.run()
    assert len(bench.puller.pulls) == 1
    bench.link.forget(sequence)
    assert bench.calls.released == ["lease"]
    bench.desk.deliver(
        PullOutcome(bench.puller.pulls[0].pull_id, (False,) * 2, "cancelled", True, 0, 0.0, "")
    )
    bench.inbox.run()
    assert not loaded and bench.calls.released == ["lease"]
    assert (bench.kv.num_used(), bench.kv.num_quarantined()) == (0, 0)


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
            run = KvTransferParams("lease", STORE, 0, 0, (BlockRef(0, 1, (1,)), BlockRef(1, 1, (1,))))
            bench.calls.looked_up[-1](StoreHit("lease", 5.0, 2, (run,)))
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
