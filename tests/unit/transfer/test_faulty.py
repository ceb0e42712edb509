"""That each fault of the wrapper is what it says, over a backend that only writes down what it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from shared.transfer.base import Pieces, ReadOp, ReadState, Sums, TransferBackend
from shared.transfer.faulty import Fault, FaultKind, FaultyBackend

OPS = [ReadOp(0, 0, 4), ReadOp(4, 8, 4), ReadOp(8, 16, 4)]


class Scribe(TransferBackend):
    """Every read is done at once."""

    name = "scribe"

    def __init__(self) -> None:
        self.reads: list[list[ReadOp]] = []
        self.sums: Sums | None = None
        self.pieces: Sequence[Pieces] = ()

    def register(self, name: str, buffer: memoryview, fd: int, pieces: Sequence[Pieces] = ()) -> None:
        self.pieces = pieces

    def describe(self) -> bytes:
        return b""

    def connect(self, peer_name: str, metadata: bytes) -> Any: ...
    def read(
        self,
        peer: Any,
        remote_region: str,
        local_region: str,
        ops: Sequence[ReadOp],
        sums: Sums | None = None,
    ) -> Any:
        self.reads.append(list(ops))
        self.sums = sums
        return len(self.reads)

    def poll(self, handle: Any) -> ReadState:
        return ReadState.DONE

    def release(self, handle: Any) -> bool:
        return True

    def notify(self, peer: Any, payload: bytes) -> None: ...
    def notifications(self) -> list[bytes]:
        return []

    def disconnect(self, peer: Any) -> None: ...
    def close(self) -> None: ...


@pytest.fixture
def scribe() -> Scribe:
    return Scribe()


def read(backend: FaultyBackend) -> Any:
    return backend.read(None, "kv", "kv", OPS)


def test_reversed_ops_are_reads_of_their_own_last_first(scribe: Scribe) -> None:
    backend = FaultyBackend(scribe, {0: Fault(FaultKind.REVERSE)})
    handle = read(backend)
    states = [backend.poll(handle) for _ in OPS]
    assert states == [ReadState.PENDING, ReadState.PENDING, ReadState.DONE]
    assert scribe.reads == [[op] for op in reversed(OPS)]


def test_an_overtaken_read_starts_when_the_next_ones_have_ended(scribe: Scribe) -> None:
    backend = FaultyBackend(scribe, {0: Fault(FaultKind.OVERTAKEN, 2)})
    late = read(backend)
    for _ in range(2):
        assert backend.poll(late) is ReadState.PENDING
        assert backend.poll(read(backend)) is ReadState.DONE
    assert len(scribe.reads) == 2
    assert backend.poll(late) is ReadState.DONE
    assert backend.ended == [1, 2, 0]


def test_a_restart_comes_before_its_read(scribe: Scribe) -> None:
    seen: list[int] = []
    injected: list[Fault] = []
    backend = FaultyBackend(
        scribe, {}, restart=lambda: seen.append(len(scribe.reads)), injected=injected.append
    )
    backend.inject(Fault(FaultKind.RESTART), after=1)
    assert [backend.poll(read(backend)) for _ in range(3)] == [ReadState.DONE] * 3
    assert (seen, len(scribe.reads)) == ([1], 3)
    assert [fault.kind for fault in injected] == [FaultKind.RESTART]


def test_checksums_are_left_to_the_caller(scribe: Scribe) -> None:
    """What the wrapper damages after landing would not show in those of the inner backend."""
    sums = Sums(4)
    FaultyBackend(scribe, {0: Fault(FaultKind.FLIP)}).read(None, "kv", "kv", OPS, sums)
    assert (scribe.sums, sums.values) == (None, None)


def test_what_is_registered_reaches_the_inner_backend(scribe: Scribe) -> None:
    pieces = (Pieces(0, 8, 2),)
    FaultyBackend(scribe, {}).register("kv", memoryview(bytearray(16)), -1, pieces)
    assert scribe.pieces == pieces
