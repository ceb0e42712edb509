"""What a ``tcp`` server makes of hostile clients, and a client of a hostile server."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec
import pytest

from shared.errors import PeerLost
from shared.transfer import tcp_server
from shared.transfer.arena import Arena
from shared.transfer.base import ReadOp, ReadState
from shared.transfer.tcp import TcpBackend, _Metadata, _Peer
from shared.transfer.tcp_server import FRAME, HELLO, MAGIC, NOTIFY, READ, REPLY, WELCOME


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create("kv", (2,), (4096,), "a" * 32) as made:
        made.block(0, 1)[:] = bytes(range(256)) * 16
        yield made


@pytest.fixture
def server(arena: Arena) -> Iterator[TcpBackend]:
    made = TcpBackend()
    made.register("kv", arena.buffer, arena.fd)
    yield made
    made.close()


@pytest.fixture
def described(server: TcpBackend) -> _Metadata:
    return msgspec.msgpack.decode(server.describe(), type=_Metadata)


@pytest.fixture
def client(described: _Metadata) -> Iterator[socket.socket]:
    """A connection that has said hello."""
    with dial(described) as sock:
        sock.sendall(HELLO.pack(MAGIC, described.token))
        assert sock.recv(1) == WELCOME
        yield sock


def dial(described: _Metadata) -> socket.socket:
    return socket.create_connection((described.host, described.port), 10)


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def read_frame(start: int, nbytes: int, request: int = 1) -> bytes:
    mask = (1 << 64) - 1
    pair = (start & mask).to_bytes(8, "little") + (nbytes & mask).to_bytes(8, "little")
    return FRAME.pack(READ, 0, 0, 1, request) + pair


def receive(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = sock.recv(nbytes - len(data))
        assert part
        data += part
    return data


@pytest.mark.parametrize("hello", [HELLO.pack(MAGIC, bytes(16)), HELLO.pack(b"GET / HT", bytes(16))])
def test_without_the_token_nothing_is_said(described: _Metadata, hello: bytes) -> None:
    with dial(described) as sock:
        sock.sendall(hello)
        assert is_closed(sock)


@pytest.mark.parametrize(
    "frame",
    [
        FRAME.pack(9, 0, 0, 1, 1),
        FRAME.pack(READ, 1, 0, 1, 1),
        FRAME.pack(READ, 0, 0, 0, 1),
        FRAME.pack(READ, 0, 0, 1 << 31, 1),
        FRAME.pack(NOTIFY, 0, 0, 513, 0),
        read_frame(1 << 40, 8),
        read_frame(0, 1 << 40),
        read_frame(-8, 16),
        read_frame(8, -4),
        read_frame(0, 0),
    ],
)
def test_a_malformed_frame_closes_its_connection_alone(
    described: _Metadata, client: socket.socket, arena: Arena, frame: bytes
) -> None:
    with dial(described) as bad:
        bad.sendall(HELLO.pack(MAGIC, described.token))
        assert bad.recv(1) == WELCOME
        bad.sendall(frame)
        assert is_closed(bad)
    client.sendall(read_frame(arena.info.data_offsets[0] + 4096, 256, 5))
    assert receive(client, REPLY.size + 256) == REPLY.pack(5, 256) + bytes(range(256))


def test_a_frame_may_come_in_any_pieces(client: socket.socket, server: TcpBackend, arena: Arena) -> None:
    stream = FRAME.pack(NOTIFY, 0, 0, 2, 0) + b"hi" + read_frame(arena.info.data_offsets[0] + 4096, 4)
    for i in range(len(stream)):
        client.sendall(stream[i : i + 1])
    assert receive(client, REPLY.size + 4)[REPLY.size :] == bytes(range(4))
    assert server.notifications() == [b"hi"]


def test_a_client_that_reads_nothing_does_not_fill_the_server(
    client: socket.socket, described: _Metadata
) -> None:
    """Its requests stay in the kernel; others are served meanwhile."""
    client.settimeout(0.5)
    frames = b"".join(read_frame(0, 8192, i) for i in range(2000))
    with pytest.raises(TimeoutError):
        for _ in range(200):
            client.sendall(frames)
    with dial(described) as other:
        other.sendall(HELLO.pack(MAGIC, described.token) + read_frame(0, 8))
        assert len(receive(other, 1 + REPLY.size + 8)) == 1 + REPLY.size + 8


def test_strangers_give_way_to_clients(
    described: _Metadata, client: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_server, "_MAX_CONNECTIONS", 3)
    with dial(described) as oldest, dial(described) as older, dial(described) as friend:
        friend.sendall(HELLO.pack(MAGIC, described.token))
        assert friend.recv(1) == WELCOME
        assert is_closed(oldest)
        older.sendall(b"?")
        client.sendall(read_frame(0, 8))
        assert receive(client, REPLY.size + 8)


class FakeServer:
    """A server that the test writes itself, connected to a backend."""

    def __init__(self, arena: Arena) -> None:
        self.backend = TcpBackend()
        self.backend.register("kv", arena.buffer, arena.fd)
        own = msgspec.msgpack.decode(self.backend.describe(), type=_Metadata)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            # The hello and its answer fit the socket buffers, so one thread can play both sides.
            listener.settimeout(10)
            probe = socket.create_connection(listener.getsockname())
            accepted, _ = listener.accept()
            accepted.sendall(WELCOME)
            assert probe.recv(1) == WELCOME
        probe.setblocking(False)
        self.sock = accepted
        self.peer = _Peer(probe, own.regions)

    def wait(self, handle: object) -> ReadState:
        while (state := self.backend.poll(handle)) is ReadState.PENDING:  # type: ignore[arg-type]
            pass
        return state

    def close(self) -> None:
        self.peer.close()
        self.sock.close()
        self.backend.close()


@pytest.fixture
def fake(arena: Arena) -> Iterator[FakeServer]:
    made = FakeServer(arena)
    yield made
    made.close()


@pytest.mark.parametrize("answer", [REPLY.pack(99, 8), REPLY.pack(1, 9), REPLY.pack(1, 8) + b"abc"])
def test_a_wrong_or_cut_answer_fails_the_read(fake: FakeServer, answer: bytes) -> None:
    handle = fake.backend.read(fake.peer, "kv", "kv", [ReadOp(0, 4096, 8)])
    fake.sock.sendall(answer)
    fake.sock.close()
    assert fake.wait(handle) is ReadState.FAILED
    with pytest.raises(PeerLost):
        fake.backend.read(fake.peer, "kv", "kv", [ReadOp(0, 4096, 8)])


def test_an_unfinished_read_is_safe_only_after_disconnect(fake: FakeServer, arena: Arena) -> None:
    at = arena.info.data_offsets[0]
    handle = fake.backend.read(fake.peer, "kv", "kv", [ReadOp(0, at, 8)])
    assert fake.backend.poll(handle) is ReadState.PENDING
    assert fake.backend.release(handle) is False
    assert fake.sock.fileno() >= 0
    fake.backend.disconnect(fake.peer)
    assert fake.backend.release(handle) is True
    assert fake.backend.poll(handle) is ReadState.FAILED
    assert bytes(arena.block(0, 0)[:8]) == bytes(8)


def test_a_server_that_is_silent_or_gone_is_lost(arena: Arena) -> None:
    backend = TcpBackend(connect_timeout_s=0.05)
    backend.register("kv", arena.buffer, arena.fd)
    own = msgspec.msgpack.decode(backend.describe(), type=_Metadata)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = msgspec.structs.replace(own, port=listener.getsockname()[1])
        with pytest.raises(PeerLost):
            backend.connect("silent", msgspec.msgpack.encode(silent))
    with pytest.raises(PeerLost):
        backend.connect("gone", msgspec.msgpack.encode(silent))
    backend.close()


def test_a_connection_dropped_in_this_round_is_served_no_more(
    client: socket.socket, server: TcpBackend
) -> None:
    """Its event may still be in the list of the round in which it gave way to another."""
    served = server._server
    served.close()
    (sock, peer) = socket.socketpair()
    connection = tcp_server._Connection(sock, b"", [])
    for events in (tcp_server.selectors.EVENT_READ, tcp_server.selectors.EVENT_WRITE):
        connection.close()
        served._serve(connection, events)
    peer.close()
