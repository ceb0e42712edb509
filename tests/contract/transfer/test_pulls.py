"""The contract of a pull between two processes, the same over every backend."""

from __future__ import annotations

import msgspec
import pytest

from shared.clock import ManualClock
from shared.failpoints import Failpoints
from shared.kernels.checksum import packed_checksum
from shared.transfer.arena import HEADER_BYTES
from shared.transfer.faulty import Fault, FaultKind
from shared.transfer.handoff import PackedCheck
from shared.types.transfer import BlockRef
from tests.contract.transfer.harness import PATIENCE_S, MakePeer, MakeReader, Peer, Reader
from tests.contract.transfer.peer import EXTENT_BYTES, content


def commit_many(peer: Peer, group: int, blocks: list[int]) -> list[BlockRef]:
    return [peer.commit(group, block, seed=100 * group + block) for block in blocks]


def assert_holds(reader: Reader, group: int, local: list[int], seeds: list[int]) -> None:
    for block, seed in zip(local, seeds, strict=True):
        assert reader.bytes_of(group, block) == content(group, seed)


def assert_untouched(reader: Reader, group: int, local: list[int]) -> None:
    for block in local:
        assert reader.bytes_of(group, block) == bytes(EXTENT_BYTES[group])


def test_blocks_of_each_group_arrive_where_they_should(peer: Peer, reader: Reader) -> None:
    for group, remote, local in ((0, [0, 1, 2, 7], [5, 6, 7, 3]), (1, [4, 2], [0, 7])):
        refs = commit_many(peer, group, remote)
        outcome = reader.pull(peer.info, group, refs, local)
        assert (outcome.ok, outcome.reason, outcome.terminal) == ((True,) * len(refs), "", True)
        assert outcome.nbytes == len(refs) * EXTENT_BYTES[group]
        assert outcome.backend == reader.backend.name
        assert_holds(reader, group, local, [100 * group + block for block in remote])


def test_a_reused_block_is_stale_and_the_others_arrive(peer: Peer, reader: Reader) -> None:
    refs = commit_many(peer, 0, [0, 1, 2])
    peer.call("bump", 0, 1)
    outcome = reader.pull(peer.info, 0, refs, [0, 1, 2])
    assert (outcome.ok, outcome.reason) == ((True, False, True), "stale")
    assert outcome.nbytes == 2 * EXTENT_BYTES[0]
    assert_untouched(reader, 0, [1])


def test_a_block_that_was_never_committed_is_stale(peer: Peer, reader: Reader) -> None:
    outcome = reader.pull(peer.info, 0, [BlockRef(15, 0, (0, 0))], [0])
    assert (outcome.ok, outcome.reason) == ((False,), "stale")


def test_a_flipped_bit_is_corrupt_and_unseen_without_verification(
    peer: Peer, reader: Reader, make_reader: MakeReader
) -> None:
    refs = commit_many(peer, 1, [3, 5])
    peer.call("flip", 1, 5, 8 * EXTENT_BYTES[1] - 1)
    outcome = reader.pull(peer.info, 1, refs, [0, 1])
    assert (outcome.ok, outcome.reason) == ((True, False), "corrupt")
    # The control: it is the checksum that finds it.
    assert make_reader(verify=False).pull(peer.info, 1, refs, [0, 1]).reason == ""


def test_a_packed_item_is_good_or_bad_as_a_whole(peer: Peer, reader: Reader) -> None:
    refs = commit_many(peer, 0, [8, 9])
    nbytes = EXTENT_BYTES[0] + 100
    parts = (content(0, 8), content(0, 9)[:100])
    good = PackedCheck(nbytes, packed_checksum(parts))
    outcome = reader.pull(peer.info, 0, refs, [0, 1], packed=good)
    assert (outcome.ok, outcome.nbytes) == ((True, True), nbytes)
    assert reader.bytes_of(0, 1)[100:] == bytes(EXTENT_BYTES[0] - 100)
    bad = PackedCheck(nbytes, good.checksum ^ 1)
    assert reader.pull(peer.info, 0, refs, [0, 1], packed=bad).ok == (False, False)


def test_a_pull_that_does_not_fit_is_refused(peer: Peer, reader: Reader) -> None:
    (ref,) = commit_many(peer, 0, [0])
    for refs, local, more in (
        ([BlockRef(16, 1, (0, 0))], [0], {}),
        ([BlockRef(-1, 1, (0, 0))], [0], {}),
        ([ref], [16], {}),
        ([ref], [0], {"packed": PackedCheck(EXTENT_BYTES[0] + 1, 0)}),
    ):
        outcome = reader.pull(peer.info, 0, refs, local, **more)
        assert (outcome.ok, outcome.reason, outcome.terminal) == ((False,), "failed", True)
    assert reader.pull(peer.info, 0, [], []).ok == ()
    assert reader.pull(peer.info, 0, [ref], [0]).reason == ""


def test_an_armed_failpoint_fails_the_pull_alone(peer: Peer, make_reader: MakeReader) -> None:
    refs = commit_many(peer, 0, [0, 1])
    reader = make_reader(failpoints=Failpoints.parse("xfer.before_verified=raise:1"))
    assert reader.pull(peer.info, 0, refs, [0, 1]).reason == "failed"
    assert reader.pull(peer.info, 0, refs, [0, 1]).reason == ""


def test_notifications_arrive_once_and_in_order(peer: Peer, reader: Reader) -> None:
    (ref,) = commit_many(peer, 0, [0])
    before = len(peer.call("notes"))
    sent = [f"commit-{id(reader)}-{i}" for i in range(40)]
    for text in sent:
        reader.puller.notify(peer.info, text.encode())
    heard: list[str] = []
    while len(heard) < len(sent):
        # A pull between two looks: progress on this side, and no sleep.
        assert reader.pull(peer.info, 0, [ref], [0]).reason == ""
        heard = peer.call("notes")[before:]
    assert heard == sent


def test_an_older_epoch_is_fenced(make_peer: MakePeer, make_reader: MakeReader) -> None:
    peer, reader = make_peer(), make_reader()
    refs = commit_many(peer, 0, [0])
    assert reader.pull(peer.info, 0, refs, [0]).reason == ""
    peer.call("epoch", 2)
    assert reader.pull(peer.info, 0, refs, [1]).reason == "stale"
    assert_untouched(reader, 0, [1])


def test_a_killed_peer_is_lost_quickly_and_its_successor_is_reached(
    backend: str, make_peer: MakePeer, make_reader: MakeReader
) -> None:
    first, reader = make_peer(), make_reader()
    refs = commit_many(first, 0, [0])
    assert reader.pull(first.info, 0, refs, [0]).reason == ""
    first.kill()
    lost = reader.pull(first.info, 0, refs, [1])
    assert (lost.reason, lost.terminal) == ("peer_lost", True)
    again = reader.pull(first.info, 0, refs, [1])
    assert again.reason == "peer_lost"
    second = make_peer("c" * 32, 2)
    refs = commit_many(second, 0, [0])
    assert reader.pull(second.info, 0, refs, [1]).reason == ""
    # What still speaks of the first life is refused, and does no harm to the second.
    assert reader.pull(first.info, 0, refs, [2]).reason == "peer_lost"
    assert reader.pull(second.info, 0, refs, [3]).reason == ""


def test_a_frozen_peer_never_stops_other_pulls(
    backend: str, peer: Peer, make_peer: MakePeer, make_reader: MakeReader
) -> None:
    """Over shared memory a frozen peer still reads well; over a network the deadline ends it."""
    frozen, reader = make_peer("d" * 32), make_reader()
    frozen_info = frozen.info
    refs = commit_many(frozen, 0, [0])
    good = commit_many(peer, 0, [1])
    assert reader.pull(frozen_info, 0, refs, [0]).reason == ""
    frozen.freeze()
    outcome = reader.pull(frozen_info, 0, refs, [1], deadline_s=0.3)
    assert outcome.reason in ("", "timeout")
    assert backend != "shm" or outcome.reason == ""
    if not outcome.terminal:
        assert reader.settled.get(timeout=PATIENCE_S) == outcome.pull_id
    other = msgspec.structs.replace(peer.info, worker_id="other")
    assert reader.pull(other, 0, good, [2]).reason == ""
    frozen.thaw()


def test_a_peer_killed_under_a_pull_is_lost_before_the_deadline(
    make_peer: MakePeer, make_reader: MakeReader
) -> None:
    """Frozen first, so that where the producer must help the pull is surely pending."""
    doomed, reader = make_peer("7" * 32), make_reader()
    refs = commit_many(doomed, 0, [0])
    assert reader.pull(doomed.info, 0, refs, [0]).reason == ""
    doomed.freeze()
    pull_id = reader.submit(doomed.info, 0, refs, [1])
    doomed.kill()
    outcome = reader.outcomes.get(timeout=PATIENCE_S)
    assert (outcome.pull_id, outcome.terminal) == (pull_id, True)
    assert outcome.reason in ("", "peer_lost")
    assert reader.pull(doomed.info, 0, refs, [2]).reason == "peer_lost"


def test_a_block_reused_under_a_pull_is_never_taken_for_the_old_one(
    peer: Peer, make_reader: MakeReader
) -> None:
    """The fence alone must notice, so checksums are off: good means the bytes of that generation."""
    reader = make_reader(verify=False)
    for seed in range(60):
        ref = peer.commit(1, 7, seed)
        reader.submit(peer.info, 1, [ref], [0])
        peer.commit(1, 7, seed + 1000)
        outcome = reader.outcomes.get(timeout=PATIENCE_S)
        assert outcome.reason in ("", "stale")
        assert outcome.reason or reader.bytes_of(1, 0) == content(1, seed)


FAULTS = {
    "truncated fence": ({0: Fault(FaultKind.TRUNCATE, 40)}, "stale"),
    "truncated data": ({1: Fault(FaultKind.TRUNCATE, EXTENT_BYTES[0] // 2)}, "corrupt"),
    "truncated second fence": ({2: Fault(FaultKind.TRUNCATE, HEADER_BYTES)}, "stale"),
    "nothing of the second fence": ({2: Fault(FaultKind.TRUNCATE, 1)}, "stale"),
    "flipped data": ({1: Fault(FaultKind.FLIP, 12345)}, "corrupt"),
    "flipped generation": ({2: Fault(FaultKind.FLIP, 8 * HEADER_BYTES)}, "stale"),
    "failed": ({1: Fault(FaultKind.FAIL)}, "peer_lost"),
    "lost": ({1: Fault(FaultKind.LOSE)}, "peer_lost"),
    "delayed": ({0: Fault(FaultKind.DELAY, 5), 1: Fault(FaultKind.DELAY, 5)}, ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_of_the_wire_gives_a_wrong_block(fault: str, peer: Peer, make_reader: MakeReader) -> None:
    schedule, reason = FAULTS[fault]
    refs = commit_many(peer, 0, [0])
    reader = make_reader(schedule)
    outcome = reader.pull(peer.info, 0, refs, [0])
    assert reader.injected.qsize() == len(schedule)
    assert (outcome.reason, outcome.ok, outcome.terminal) == (reason, (reason == "",), True)
    # The next pull, without a fault, is fine.
    assert reader.pull(peer.info, 0, refs, [1]).reason == ""
    assert_holds(reader, 0, [1], [0])


def test_a_dropped_read_times_out_and_is_settled(peer: Peer, make_reader: MakeReader) -> None:
    clock = ManualClock()
    reader = make_reader({1: Fault(FaultKind.DROP)}, clock=clock, deadline_s=5.0)
    refs = commit_many(peer, 0, [0])
    pull_id = reader.submit(peer.info, 0, refs, [0])
    reader.injected.get(timeout=PATIENCE_S)
    clock.advance(5.0)
    outcome = reader.outcomes.get(timeout=PATIENCE_S)
    assert (outcome.pull_id, outcome.reason, outcome.terminal) == (pull_id, "timeout", False)
    assert reader.settled.get(timeout=PATIENCE_S) == pull_id
    assert reader.pull(peer.info, 0, refs, [1]).reason == ""


def test_a_frozen_read_never_lands_after_settled(peer: Peer, make_reader: MakeReader) -> None:
    clock = ManualClock()
    reader = make_reader({1: Fault(FaultKind.FREEZE)}, clock=clock, deadline_s=5.0)
    pull_id = reader.submit(peer.info, 0, commit_many(peer, 0, [0]), [0])
    reader.injected.get(timeout=PATIENCE_S)
    clock.advance(5.0)
    assert reader.outcomes.get(timeout=PATIENCE_S).terminal is False
    assert reader.settled.get(timeout=PATIENCE_S) == pull_id
    assert reader.backend.land() == 0  # type: ignore[attr-defined]
    assert_untouched(reader, 0, [0])


def test_a_late_landing_comes_before_settled(peer: Peer, make_reader: MakeReader) -> None:
    """A cancelled pull answers at once; its destination is unsafe until the read has really ended."""
    reader = make_reader({1: Fault(FaultKind.FREEZE, 40)})
    pull_id = reader.submit(peer.info, 0, commit_many(peer, 0, [6]), [0])
    reader.injected.get(timeout=PATIENCE_S)
    reader.puller.cancel(pull_id)
    outcome = reader.outcomes.get(timeout=PATIENCE_S)
    assert (outcome.reason, outcome.ok) == ("cancelled", (False,))
    assert outcome.terminal is False
    assert reader.settled.get(timeout=PATIENCE_S) == pull_id
    assert_holds(reader, 0, [0], [6])
    reader.puller.cancel(pull_id)
    reader.puller.cancel("unknown")
    assert reader.pull(peer.info, 0, commit_many(peer, 0, [7]), [1]).reason == ""


def test_closing_answers_every_pull(peer: Peer, make_reader: MakeReader) -> None:
    reader = make_reader({1: Fault(FaultKind.DROP)})
    refs = commit_many(peer, 0, [0])
    ids = {reader.submit(peer.info, 0, refs, [i]) for i in range(3)}
    reader.puller.close()
    outcomes = [reader.outcomes.get(timeout=PATIENCE_S) for _ in ids]
    assert {o.pull_id for o in outcomes} == ids
    unsafe = {o.pull_id for o in outcomes if not o.terminal}
    assert {reader.settled.get(timeout=PATIENCE_S) for _ in unsafe} == unsafe
    assert reader.outcomes.empty() and reader.settled.empty()
