"""How an agent chooses a transport, and which of a worker's lives a link belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from shared.clock import ManualClock
from shared.errors import ConfigError, PeerLost
from shared.transfer.agent import Link, Links, TransferAgent
from shared.transfer.arena import Arena
from shared.transfer.base import Pieces, ReadOp, ReadState, Sums, TransferBackend
from shared.transfer.shm import ShmBackend
from shared.transfer.tcp import TcpBackend
from shared.types.transfer import AgentInfo, Endpoint


class Switchboard(TransferBackend):
    """A backend of nothing but connections; ``down`` names metadata that cannot be reached."""

    def __init__(self, name: str) -> None:
        self.name = name  # type: ignore[misc]
        self.down: set[bytes] = set()
        self.tried: list[bytes] = []
        self.open: list[bytes] = []

    def register(self, name: str, buffer: memoryview, fd: int, pieces: Sequence[Pieces] = ()) -> None: ...
    def describe(self) -> bytes:
        return b"own"

    def connect(self, peer_name: str, metadata: bytes) -> bytes:
        self.tried.append(metadata)
        if metadata in self.down:
            raise PeerLost("down")
        self.open.append(metadata)
        return metadata

    def read(
        self,
        peer: Any,
        remote_region: str,
        local_region: str,
        ops: Sequence[ReadOp],
        sums: Sums | None = None,
    ) -> Any: ...
    def poll(self, handle: Any) -> ReadState:
        return ReadState.DONE

    def release(self, handle: Any) -> bool:
        return True

    def notify(self, peer: Any, payload: bytes) -> None: ...
    def notifications(self) -> list[bytes]:
        return []

    def disconnect(self, peer: bytes) -> None:
        self.open.remove(peer)

    def close(self) -> None: ...


class Board:
    """Two transports, a clock, and the links under test."""

    def __init__(self) -> None:
        self.near, self.far = Switchboard("near"), Switchboard("far")
        self.clock = ManualClock()
        self.dropped: list[str] = []
        self.links = Links(
            (self.near, self.far), self.clock, lambda link: self.dropped.append(link.incarnation)
        )

    def get(self, incarnation: str, epoch: int, *backends: str) -> Link:
        endpoints = tuple(Endpoint(b, incarnation.encode()) for b in backends or ("far", "near"))
        return self.links.get(AgentInfo("worker", incarnation, epoch, endpoints, ()))


@pytest.fixture
def board() -> Board:
    return Board()


def test_the_first_transport_of_our_order_that_connects_is_kept(board: Board) -> None:
    board.near.down.add(b"one")
    assert board.get("one", 1).backend is board.far
    assert board.get("one", 1) is board.get("one", 1)
    assert (len(board.near.tried), len(board.far.tried)) == (1, 1)


def test_a_peer_without_a_common_transport_is_lost(board: Board) -> None:
    with pytest.raises(PeerLost):
        board.get("one", 1, "carrier pigeon")


def test_an_unreachable_peer_is_not_dialled_again_at_once(board: Board) -> None:
    board.near.down.add(b"one")
    for _ in range(3):
        with pytest.raises(PeerLost):
            board.get("one", 1, "near")
    assert len(board.near.tried) == 1
    board.clock.advance(1.0)
    board.near.down.clear()
    assert board.get("one", 1, "near").backend is board.near


def test_a_new_life_displaces_the_old_one_and_the_old_never_comes_back(board: Board) -> None:
    board.get("one", 1)
    board.get("two", 2)
    assert board.dropped == ["one"]
    assert board.near.open == [b"two"]
    with pytest.raises(PeerLost):
        board.get("one", 1)
    assert board.near.open == [b"two"]


def test_a_new_life_that_cannot_be_reached_leaves_the_old_link(board: Board) -> None:
    board.get("one", 1)
    board.near.down.add(b"two")
    board.far.down.add(b"two")
    with pytest.raises(PeerLost):
        board.get("two", 2)
    assert board.near.open == [b"one"]


def test_idle_links_are_dropped_and_used_ones_are_not(board: Board) -> None:
    link = board.get("one", 1)
    board.clock.advance(61)
    board.links.drop_idle(lambda candidate: candidate is link)
    assert board.dropped == []
    board.links.drop_idle(lambda candidate: False)
    assert board.dropped == ["one"]
    board.links.drop(link)
    assert board.dropped == ["one"]


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create("kv", (2,), (64,), "a" * 32, 4) as made:
        yield made


def test_the_agent_describes_its_arenas_and_follows_the_epoch(arena: Arena) -> None:
    agent = TransferAgent("w", "a" * 32, [TcpBackend(), ShmBackend()], {"kv": arena}, ("shm", "tcp"))
    info = agent.info()
    assert [e.backend for e in info.endpoints] == ["shm", "tcp"]
    assert [r.name for r in info.regions] == ["kv"]
    assert info.epoch == 4
    agent.set_epoch(6)
    assert (agent.info().epoch, arena.epoch) == (6, 6)
    agent.close()


def test_an_order_without_its_backend_is_a_configuration_error(arena: Arena) -> None:
    with pytest.raises(ConfigError, match="nixl"):
        TransferAgent("w", "a" * 32, [], {"kv": arena}, ("nixl",))
