"""How ``mooncake`` goes through its stages, and that nothing but ``poll`` ever writes to a destination."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from shared.transfer.arena import Arena
from shared.transfer.base import ReadOp, ReadState

pytest.importorskip("mooncake.engine", reason="mooncake is not installed", exc_type=ImportError)

from shared.transfer import mooncake
from shared.transfer.mooncake import MooncakeBackend, _fitting

EXTENT = (9 << 20) + 12345


class Pair:
    """A producer and a consumer in one process, each with one large block."""

    def __init__(self) -> None:
        self.arenas = [Arena.create("kv", (1,), (EXTENT,), incarnation * 32) for incarnation in "ab"]
        self.theirs, self.ours = MooncakeBackend(), MooncakeBackend()
        for backend, arena in zip((self.theirs, self.ours), self.arenas, strict=True):
            backend.register("kv", arena.buffer, arena.fd)
        self.arenas[0].block(0, 0)[:] = np.random.default_rng(7).bytes(EXTENT)
        self.peer = self.ours.connect("theirs", self.theirs.describe())
        first = self.arenas[0].info.data_offsets[0]
        self.ops = [ReadOp(first, first, EXTENT)]

    def read(self) -> mooncake._Handle:
        return self.ours.read(self.peer, "kv", "kv", self.ops)

    @property
    def arrived(self) -> bool:
        theirs, ours = self.arenas
        return bytes(ours.block(0, 0)) == bytes(theirs.block(0, 0))

    @property
    def touched(self) -> bool:
        return bool(np.frombuffer(self.arenas[1].block(0, 0), np.uint8).any())

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()
        for arena in self.arenas:
            arena.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_a_block_larger_than_the_stages_arrives(pair: Pair) -> None:
    handle = pair.read()
    while (state := pair.ours.poll(handle)) is ReadState.PENDING:
        pass
    assert state is ReadState.DONE
    assert pair.arrived


@pytest.mark.parametrize("end", ["disconnect", "release"])
def test_what_lands_after_the_end_stays_in_the_stage(pair: Pair, end: str) -> None:
    handle, twin = pair.read(), None
    if end == "disconnect":
        pair.ours.disconnect(pair.peer)
        pair.peer.thread.join(20)
        assert not pair.peer.thread.is_alive()
    else:
        assert pair.ours.release(handle) is True
        # What was asked for before it has landed once this one, asked for after it, has.
        twin = pair.ours.read(pair.peer, "kv", "kv", [ReadOp(0, 0, 8)])
        while pair.ours.poll(twin) is ReadState.PENDING:
            pass
    assert pair.ours.poll(handle) is ReadState.FAILED
    assert not pair.touched


def test_ops_are_cut_into_groups_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "_STAGE_BYTES", 10)
    monkeypatch.setattr(mooncake, "_MAX_OPS", 2)
    groups = list(_fitting([ReadOp(0, 100, 25), ReadOp(50, 200, 1), ReadOp(60, 300, 3)]))
    assert groups == [
        [ReadOp(0, 100, 10)],
        [ReadOp(10, 110, 10)],
        [ReadOp(20, 120, 5), ReadOp(50, 200, 1)],
        [ReadOp(60, 300, 3)],
    ]


def test_a_stranger_cannot_notify(pair: Pair) -> None:
    engine = pair.ours._engine
    kinds = engine.library.TransferNotify
    known = mooncake.base64.b64encode(b"real").decode()
    for name, message in (
        ("nobody", known),
        (pair.theirs._token, "not base64!"),
        (pair.theirs._token, known),
    ):
        target, place = pair.peer._described.engine, pair.peer._stages[0].ctypes.data
        source = pair.peer._described.regions[0].address
        read = engine.library.TransferOpcode.Read
        assert engine.engine.transfer_sync(target, place, source, 1, read, kinds(name, message)) == 0
    heard: list[bytes] = []
    while not heard:
        heard = pair.theirs.notifications()
    assert heard == [b"real"]
