"""What ``nixl`` prepares once and names by index, and what it makes of a peer's claims."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from shared.errors import TransferError
from shared.kernels.checksum import checksum
from shared.transfer.arena import Arena
from shared.transfer.base import Pieces, ReadOp, ReadState, Sums

pytest.importorskip("nixl_cu12", reason="nixl is not installed")

from shared.transfer import nixl_descriptors
from shared.transfer.nixl import NixlBackend, _Peer
from shared.transfer.nixl_descriptors import Metadata, indices_of

EXTENT, NUM_BLOCKS = 4096, 6


class Side:
    """A backend with one arena."""

    def __init__(self, name: str, fill: int) -> None:
        self.arena = Arena.create("kv", (NUM_BLOCKS,), (EXTENT,), "a" * 32)
        self.first = self.arena.info.data_offsets[0]
        np.frombuffer(self.arena.data(0), np.uint8)[:] = fill
        self.backend = NixlBackend(f"{name}-{id(self)}")
        self.register()

    def register(self) -> None:
        pieces = (Pieces(self.first, EXTENT, NUM_BLOCKS),)
        self.backend.register("kv", self.arena.buffer, self.arena.fd, pieces)

    def ops(self, *pairs: tuple[int, int], nbytes: int = EXTENT) -> list[ReadOp]:
        return [ReadOp(self.first + a * EXTENT, self.first + b * EXTENT, nbytes) for a, b in pairs]

    def read(self, peer: _Peer, ops: list[ReadOp]) -> None:
        handle = self.backend.read(peer, "kv", "kv", ops)
        while (state := self.backend.poll(handle)) is ReadState.PENDING:
            pass
        assert state is ReadState.DONE

    def close(self) -> None:
        self.backend.close()
        self.arena.close()


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    ours, theirs = Side("ours", 1), Side("theirs", 2)
    over = threading.Event()
    serving = threading.Thread(target=lambda: _serve(theirs, over))
    serving.start()
    yield ours, theirs
    ours.close()
    over.set()
    serving.join()
    theirs.close()


def test_whole_blocks_are_named_by_index_and_prepared_once(sides: tuple[Side, Side]) -> None:
    ours, theirs = sides
    peer = ours.backend.connect("theirs", theirs.backend.describe())
    ours.read(peer, ours.ops((0, 0), nbytes=100))
    assert (ours.backend._lists, peer.lists) == ({}, {})
    theirs.arena.block(0, 5)[:] = bytes([5]) * EXTENT
    ours.read(peer, ours.ops((5, 2), (0, 4)))
    lists = dict(ours.backend._lists), dict(peer.lists)
    assert [len(found) for found in lists] == [1, 1]
    assert [bytes(ours.arena.block(0, block))[0] for block in range(NUM_BLOCKS)] == [2, 1, 5, 1, 2, 1]
    ours.read(peer, ours.ops((1, 1)))
    assert (ours.backend._lists, peer.lists) == lists
    ours.backend.disconnect(peer)
    assert peer.lists == {}
    again = ours.backend.connect("theirs", theirs.backend.describe())
    ours.read(again, ours.ops((1, 1)))
    assert (ours.backend._lists, len(again.lists)) == (lists[0], 1)
    ours.register()
    assert ours.backend._lists == {}


def test_checksums_are_taken_run_by_run(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_descriptors, "_RUN_BYTES", 2 * EXTENT)
    ours, theirs = sides
    peer = ours.backend.connect("theirs", theirs.backend.describe())
    for block in range(NUM_BLOCKS):
        theirs.arena.block(0, block)[:] = bytes([block, 1]) * (EXTENT // 2)
    for ops in (ours.ops((5, 0), (3, 1), (1, 2), (0, 3), (2, 5)), ours.ops((4, 1), (2, 0), nbytes=512)):
        sums = Sums(256)
        handle = ours.backend.read(peer, "kv", "kv", ops, sums)
        while (state := ours.backend.poll(handle)) is ReadState.PENDING:
            pass
        assert state is ReadState.DONE
        places = [(op.local_offset + at, 256) for op in ops for at in range(0, op.nbytes, 256)]
        assert sums.values == [checksum(ours.arena.buffer[at : at + n]) for at, n in places]
        assert len(set(sums.values)) == len(ops)


def test_no_read_waits_for_a_notification_of_before() -> None:
    """Once the peer has taken it: from then on nobody drives the peer."""
    ours, theirs = Side("ours", 1), Side("theirs", 2)
    try:
        over = threading.Event()
        serving = threading.Thread(target=lambda: _serve(theirs, over))
        serving.start()
        peer = ours.backend.connect("theirs", theirs.backend.describe())
        ours.backend.notify(peer, b"hello")
        settling = peer.settling
        assert settling is not None
        while ours.backend.poll(settling) is ReadState.PENDING:
            pass
        over.set()
        serving.join()
        ours.read(peer, ours.ops((1, 1)))
        assert bytes(ours.arena.block(0, 1)) == bytes([2]) * EXTENT
    finally:
        ours.close()
        theirs.close()


def _serve(side: Side, over: threading.Event) -> None:
    while not over.wait(0.001):
        side.backend.notifications()


@pytest.mark.parametrize(
    ("offsets", "nbytes", "expected"),
    [
        ([100, 132], 16, (0, [0, 2])),
        ([1000, 1064], 32, (1, [0, 2])),
        ([100, 133], 16, None),
        ([100, 164], 16, None),
        ([84, 100], 16, None),
        ([100, 132], 32, None),
    ],
)
def test_pieces_are_found_by_offset_and_size(
    offsets: list[int], nbytes: int, expected: tuple[int, list[int]] | None
) -> None:
    found = indices_of((Pieces(100, 16, 4), Pieces(1000, 32, 4)), offsets, nbytes)
    assert (found and (found.kind, found.which.tolist())) == expected


@pytest.mark.parametrize(
    "region",
    [
        {"pieces": (Pieces(0, EXTENT, 1 << 40),)},
        {"pieces": (Pieces(-1, 8, 1),)},
        {"pieces": (Pieces(0, 0, 1),)},
        {"pieces": (Pieces(8, 8, -1),)},
        {"pieces": (Pieces(0, 1, 1 << 23),), "nbytes": 1 << 30},
        {"nbytes": 8},
        {"address": -1},
        {"nbytes": 1 << 63},
    ],
)
def test_impossible_claims_are_refused(sides: tuple[Side, Side], region: dict[str, object]) -> None:
    ours, theirs = sides
    metadata = msgspec.msgpack.decode(theirs.backend.describe(), type=Metadata)
    claimed = (msgspec.structs.replace(metadata.regions[0], **region),)
    with pytest.raises(TransferError, match="malformed"):
        ours.backend.connect(
            "theirs", msgspec.msgpack.encode(msgspec.structs.replace(metadata, regions=claimed))
        )
