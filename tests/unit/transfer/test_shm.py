"""What protects one process from another over ``shm``; what moves is in the contract suite."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import msgspec
import pytest

from shared.errors import PeerLost, TransferError
from shared.transfer.arena import Arena
from shared.transfer.shm import ShmBackend, _Metadata


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create("kv", (2,), (4096,), "a" * 32) as made:
        yield made


@pytest.fixture
def owner(arena: Arena) -> Iterator[ShmBackend]:
    made = ShmBackend()
    made.register("kv", arena.buffer, arena.fd)
    yield made
    made.close()


@pytest.fixture
def reader() -> Iterator[ShmBackend]:
    made = ShmBackend()
    yield made
    made.close()


def described(owner: ShmBackend) -> _Metadata:
    return msgspec.msgpack.decode(owner.describe(), type=_Metadata)


def altered(owner: ShmBackend, **region: object) -> bytes:
    """The owner's metadata with its region's fields replaced."""
    metadata = described(owner)
    changed = msgspec.structs.replace(metadata.regions[0], **region)
    return msgspec.msgpack.encode(msgspec.structs.replace(metadata, regions=(changed,)))


def test_a_peer_cannot_write(owner: ShmBackend, reader: ShmBackend) -> None:
    peer = reader.connect("owner", owner.describe())
    mapped = peer.regions["kv"]
    with pytest.raises(ValueError, match="read-only"):
        mapped[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        mapped.flags.writeable = True


def test_another_arena_under_the_same_number_is_refused(owner: ShmBackend, reader: ShmBackend) -> None:
    """As after a crash, when pid and descriptor mean something else."""
    with pytest.raises(PeerLost):
        reader.connect("owner", altered(owner, nonce="0" * 32))
    with pytest.raises(PeerLost):
        reader.connect("owner", altered(owner, nbytes=4096))
    with pytest.raises(PeerLost):
        reader.connect("owner", altered(owner, fd=10**6))
    with pytest.raises(TransferError):
        reader.connect("owner", msgspec.msgpack.encode(msgspec.structs.replace(described(owner), pid=0)))


def test_memory_that_could_shrink_is_refused(owner: ShmBackend, reader: ShmBackend, arena: Arena) -> None:
    fd = os.memfd_create("loose", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, bytes(arena.buffer))
        with pytest.raises(PeerLost):
            reader.connect("owner", altered(owner, fd=fd))
    finally:
        os.close(fd)


def test_a_stranger_cannot_notify(owner: ShmBackend, reader: ShmBackend) -> None:
    address = b"\0" + described(owner).notify
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for message in (b"", b"short", bytes(16) + b"forged"):
            stranger.sendto(message, address)
    reader.notify(reader.connect("owner", owner.describe()), b"real")
    assert owner.notifications() == [b"real"]


def test_more_notifications_than_the_system_queues_wait_their_turn(
    owner: ShmBackend, reader: ShmBackend
) -> None:
    peer = reader.connect("owner", owner.describe())
    sent = [str(i).encode() for i in range(700)]
    for payload in sent:
        reader.notify(peer, payload)
    heard: list[bytes] = []
    while batch := owner.notifications():
        heard += batch
        reader.notifications()
    assert heard == sent
    assert reader.filenos()


def test_an_arena_that_is_kept_for_a_next_life_is_read_like_any_other(reader: ShmBackend) -> None:
    with Arena.create("kv", (2,), (4096,), "a" * 32, ledger_bytes=512) as kept:
        owner = ShmBackend()
        owner.register("kv", kept.buffer, kept.fd)
        kept.block(0, 1)[:4] = b"mark"
        peer = reader.connect("owner", owner.describe())
        at = kept.info.data_offsets[0] + 4096
        assert bytes(peer.regions["kv"][at : at + 4]) == b"mark"
        reader.disconnect(peer)
        owner.close()
