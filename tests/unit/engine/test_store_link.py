"""A worker's side of the kv_store when requests end in the middle of it."""

from __future__ import annotations

from collections.abc import Callable

from shared.engine.desk import PullDesk
from shared.engine.inbox import Inbox
from shared.engine.store_link import RemoteStoreLink
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
        self.link = RemoteStoreLink(
            self.calls, self.kv, hasher, desk, self.inbox, deadline_s=1.0, min_blocks=1, max_offered_blocks=8
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
