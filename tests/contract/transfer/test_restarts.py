"""Reads that end in another order, and peers that start anew at the same address, over every backend."""

from __future__ import annotations

import time

import pytest

from shared.transfer.faulty import Fault, FaultKind, FaultyBackend
from tests.contract.transfer.harness import PATIENCE_S, MakePeer, MakeReader, Peer, Reader
from tests.contract.transfer.peer import content

NUM_RESTARTS = 50


def faulty(reader: Reader) -> FaultyBackend:
    assert isinstance(reader.backend, FaultyBackend)
    return reader.backend


def test_ops_in_another_order_bring_the_same_blocks(peer: Peer, make_reader: MakeReader) -> None:
    reader = make_reader({number: Fault(FaultKind.REVERSE) for number in range(3)})
    refs = [peer.commit(0, block, 30 + block) for block in (3, 0, 9, 1)]
    outcome = reader.pull(peer.info, 0, refs, [2, 5, 4, 8])
    assert (outcome.reason, outcome.ok) == ("", (True,) * 4)
    assert reader.injected.qsize() == 3
    for local, block in zip((2, 5, 4, 8), (3, 0, 9, 1), strict=True):
        assert reader.bytes_of(0, local) == content(0, 30 + block)


def test_a_pull_may_overtake_another(peer: Peer, make_reader: MakeReader) -> None:
    """The first pull's first fence is read when all three reads of the second have ended."""
    reader = make_reader({0: Fault(FaultKind.OVERTAKEN, 3)})
    refs = [peer.commit(1, block, 40 + block) for block in (0, 1)]
    ids = [reader.submit(peer.info, 1, [ref], [local]) for local, ref in enumerate(refs)]
    outcomes = [reader.outcomes.get(timeout=PATIENCE_S) for _ in ids]
    assert [(outcome.pull_id, outcome.reason) for outcome in outcomes] == [(ids[1], ""), (ids[0], "")]
    assert faulty(reader).ended[:4] == [1, 2, 3, 0]
    assert [reader.bytes_of(1, local) for local in (0, 1)] == [content(1, 40), content(1, 41)]


def test_a_block_reused_while_it_was_overtaken_is_stale(peer: Peer, make_reader: MakeReader) -> None:
    reader = make_reader({0: Fault(FaultKind.OVERTAKEN, 3)}, verify=False)
    first, second = peer.commit(1, 2, 50), peer.commit(1, 3, 51)
    late = reader.submit(peer.info, 1, [first], [0])
    reader.injected.get(timeout=PATIENCE_S)
    peer.commit(1, 2, 52)
    assert reader.pull(peer.info, 1, [second], [1]).reason == ""
    outcome = reader.outcomes.get(timeout=PATIENCE_S)
    assert (outcome.pull_id, outcome.reason) == (late, "stale")


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_peer_that_starts_anew_at_its_address_is_reached_again(
    step: int, make_peer: MakePeer, make_reader: MakeReader
) -> None:
    """It restarts under a pull, before one of its reads; what that pull brings is of the old life or nothing,
    and the next one brings the new life's blocks."""
    peer = make_peer("0" * 31 + "1", 1)
    reader = make_reader({}, restart=peer.restart)
    for seed in range(step, NUM_RESTARTS, 3):
        old, ref = peer.info, peer.commit(0, 0, seed)
        faulty(reader).inject(Fault(FaultKind.RESTART), after=step)
        outcome = reader.pull(old, 0, [ref], [0])
        assert reader.injected.get(timeout=PATIENCE_S).kind is FaultKind.RESTART
        assert (peer.info.epoch, peer.info.incarnation == old.incarnation) == (old.epoch + 1, False)
        assert outcome.terminal
        assert outcome.reason in ("", "stale", "peer_lost")
        assert outcome.reason or reader.bytes_of(0, 0) == content(0, seed)
        began = time.monotonic()
        fresh = peer.commit(0, 0, seed + 1000)
        assert reader.pull(peer.info, 0, [fresh], [1]).reason == ""
        assert time.monotonic() - began < 5.0
        assert reader.bytes_of(0, 1) == content(0, seed + 1000)
        assert reader.pull(old, 0, [ref], [2]).reason in ("stale", "peer_lost")
