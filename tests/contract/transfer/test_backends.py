"""The contract of a backend itself (``shared.transfer.base``), against a real peer process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shared.errors import PeerLost, TransferError
from shared.kernels.checksum import head_checksums
from shared.transfer.arena import Arena
from shared.transfer.base import ReadOp, ReadState, Sums, TransferBackend
from shared.types.transfer import AgentInfo
from tests.contract.transfer.harness import MakePeer, Peer
from tests.contract.transfer.peer import EXTENT_BYTES, HEADS, NUM_BLOCKS, content, make_backend


class Local:
    """One backend and one arena, driven by the test's own thread."""

    def __init__(self, backend: str) -> None:
        self.arena = Arena.create("kv", NUM_BLOCKS, EXTENT_BYTES, "e" * 32)
        self.backend: TransferBackend = make_backend(backend, f"local-{id(self)}")
        self.backend.register("kv", self.arena.buffer, self.arena.fd)
        self.own = self.backend.describe()

    def connect(self, info: AgentInfo) -> Any:
        return self.backend.connect("peer", info.endpoints[0].metadata)

    def wait(self, handle: Any) -> ReadState:
        """Poll until terminal; every backend bounds this by the peer's life."""
        while (state := self.backend.poll(handle)) is ReadState.PENDING:
            self.backend.notifications()
        return state


@pytest.fixture
def local(backend: str) -> Iterator[Local]:
    made = Local(backend)
    yield made
    made.backend.close()
    made.backend.close()
    made.arena.close()


def data_op(info: AgentInfo, group: int, remote: int, local: int) -> ReadOp:
    region = info.regions[0]
    first, extent = region.data_offsets[group], region.extent_bytes[group]
    return ReadOp(first + remote * extent, first + local * extent, extent)


def test_metadata_fits_its_bound(local: Local) -> None:
    assert 0 < len(local.own) <= 64 << 10


@pytest.mark.parametrize("metadata", [b"", b"\x80", b"\xc1" * 100, b"x" * (65 << 10), bytes(200)])
def test_malformed_metadata_is_a_typed_error(local: Local, metadata: bytes) -> None:
    with pytest.raises(TransferError):
        local.backend.connect("peer", metadata)


def test_scattered_reads_of_any_size_arrive(local: Local, peer: Peer) -> None:
    """More ops than fit one frame or one system call, in shuffled order."""
    seeds = {block: 500 + block for block in range(8)}
    for block, seed in seeds.items():
        peer.commit(0, block, seed)
    handle_to = local.connect(peer.info)
    first = peer.info.regions[0].data_offsets[0]
    pieces = np.arange(0, 8 * EXTENT_BYTES[0], 7)
    np.random.default_rng(1).shuffle(pieces)
    ops = [ReadOp(first + at, first + at, min(7, 8 * EXTENT_BYTES[0] - at)) for at in map(int, pieces)]
    assert len(ops) > 4096
    handle = local.backend.read(handle_to, "kv", "kv", ops)
    assert local.wait(handle) is ReadState.DONE
    assert local.backend.release(handle) is True
    for block, seed in seeds.items():
        assert bytes(local.arena.block(0, block)) == content(0, seed)


@pytest.mark.parametrize(
    "op",
    [
        ReadOp(-1, 0, 8),
        ReadOp(0, -1, 8),
        ReadOp(0, 0, 0),
        ReadOp(0, 0, -8),
        ReadOp(1 << 62, 0, 8),
        ReadOp(0, 1 << 62, 8),
        ReadOp(8, 8, 1 << 63),
    ],
)
def test_an_op_outside_a_region_is_refused_before_anything_moves(
    local: Local, peer: Peer, op: ReadOp
) -> None:
    connected = local.connect(peer.info)
    before = bytes(local.arena.buffer)
    with pytest.raises(TransferError):
        local.backend.read(connected, "kv", "kv", [data_op(peer.info, 0, 0, 0), op])
    assert bytes(local.arena.buffer) == before


def test_checksums_that_a_backend_takes_are_of_what_has_arrived(
    local: Local, peer: Peer, backend: str
) -> None:
    """In many runs, where it makes any; a bit that turned over behind its checksum's back shows."""
    refs = [peer.commit(1, block, 70 + block) for block in (4, 1, 6)]
    peer.call("flip", 1, 1, 99)
    ops = [data_op(peer.info, 1, ref.block_id, at) for at, ref in enumerate(refs)]
    sums = Sums(EXTENT_BYTES[1] // HEADS)
    handle = local.backend.read(local.connect(peer.info), "kv", "kv", ops, sums)
    assert local.wait(handle) is ReadState.DONE
    here = [head_checksums(local.arena.block(1, at), HEADS) for at in range(len(refs))]
    assert [a == ref.checksums for a, ref in zip(here, refs, strict=True)] == [True, False, True]
    assert (sums.values is None) is (backend in ("tcp", "mooncake"))
    assert sums.values is None or sums.values == [value for block in here for value in block]


def test_a_read_of_nothing_is_done(local: Local, peer: Peer) -> None:
    handle = local.backend.read(local.connect(peer.info), "kv", "kv", [])
    assert local.backend.poll(handle) is ReadState.DONE
    assert local.backend.release(handle) is True


def test_unknown_regions_are_refused(local: Local, peer: Peer) -> None:
    connected = local.connect(peer.info)
    ops = [data_op(peer.info, 0, 0, 0)]
    for remote, own in (("nothing", "kv"), ("kv", "nothing")):
        with pytest.raises(TransferError):
            local.backend.read(connected, remote, own, ops)


def test_a_disconnected_peer_is_lost_and_can_be_connected_again(local: Local, peer: Peer) -> None:
    peer.commit(1, 0, 9)
    ops = [data_op(peer.info, 1, 0, 0)]
    connected = local.connect(peer.info)
    local.backend.disconnect(connected)
    with pytest.raises(PeerLost):
        local.backend.read(connected, "kv", "kv", ops)
    with pytest.raises(PeerLost):
        local.backend.notify(connected, b"x")
    again = local.connect(peer.info)
    assert local.wait(local.backend.read(again, "kv", "kv", ops)) is ReadState.DONE
    assert bytes(local.arena.block(1, 0)) == content(1, 9)


def test_a_dead_peer_cannot_be_connected(local: Local, make_peer: MakePeer) -> None:
    dead = make_peer("f" * 32)
    dead.kill()
    with pytest.raises(PeerLost):
        local.connect(dead.info)


def test_the_death_of_a_connected_peer_is_noticed(local: Local, make_peer: MakePeer) -> None:
    doomed = make_peer("9" * 32)
    doomed.commit(0, 0, 1)
    ops = [data_op(doomed.info, 0, 0, 0)]
    connected = local.connect(doomed.info)
    assert local.wait(local.backend.read(connected, "kv", "kv", ops)) is ReadState.DONE
    doomed.kill()
    try:
        state = local.wait(local.backend.read(connected, "kv", "kv", ops))
    except PeerLost:
        state = ReadState.FAILED
    assert state is ReadState.FAILED


def test_a_notification_has_a_limit(local: Local, peer: Peer) -> None:
    connected = local.connect(peer.info)
    local.backend.notify(connected, b"x" * 512)
    with pytest.raises(TransferError):
        local.backend.notify(connected, b"x" * 513)
