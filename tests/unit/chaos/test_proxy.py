"""The proxy of chaos runs: what passes, what is kept back, and what arrives instead."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from tests.chaos.proxy import BOTH, Proxy, Way

PATIENCE_S = 10.0


class Echo:
    """A server that answers every byte with the one after it."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.heard = bytearray()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(sock,), daemon=True).start()

    def _answer(self, sock: socket.socket) -> None:
        with sock:
            while data := sock.recv(1 << 16):
                self.heard += data
                sock.sendall(bytes((byte + 1) % 256 for byte in data))


@pytest.fixture
def echo() -> Iterator[Echo]:
    made = Echo()
    yield made
    made.listener.shutdown(socket.SHUT_RDWR)
    made.listener.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    made = Proxy(echo.listener.getsockname())
    yield made
    made.close()


@pytest.fixture
def client(proxy: Proxy) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", proxy.port), PATIENCE_S) as sock:
        sock.settimeout(PATIENCE_S)
        yield sock


def received(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (part := sock.recv(count - len(data))):
        data += part
    return data


def kept(proxy: Proxy, way: Way, count: int) -> None:
    """Until the proxy has so many bytes in its hands."""
    reached = threading.Event()
    for _ in range(round(PATIENCE_S / 0.005)):
        if proxy.kept(way) >= count:
            return
        reached.wait(0.005)
    raise AssertionError(f"only {proxy.kept(way)} bytes were kept")


def test_bytes_pass_both_ways_and_are_counted(proxy: Proxy, client: socket.socket) -> None:
    client.sendall(b"abc")
    assert received(client, 3) == b"bcd"
    assert [proxy.passed(way) for way in Way] == [3, 3]
    assert (proxy.num_connections, proxy.kept(Way.THERE), proxy.kept(Way.BACK)) == (1, 0, 0)


@pytest.mark.parametrize("ways", [{Way.THERE}, {Way.BACK}, BOTH])
def test_what_comes_to_a_shut_way_arrives_when_it_is_opened(
    ways: set[Way], proxy: Proxy, echo: Echo, client: socket.socket
) -> None:
    client.sendall(b"a")
    assert received(client, 1) == b"b"
    proxy.shut(*ways)
    client.sendall(b"x")
    kept(proxy, Way.THERE if Way.THERE in ways else Way.BACK, 1)
    assert (b"x" in echo.heard) == (Way.THERE not in ways)
    proxy.heal()
    assert received(client, 1) == b"y"


def test_a_connection_made_while_all_is_shut_serves_later(proxy: Proxy) -> None:
    proxy.shut(*BOTH)
    with socket.create_connection(("127.0.0.1", proxy.port), PATIENCE_S) as sock:
        sock.sendall(b"a")
        proxy.heal()
        assert received(sock, 1) == b"b"


def test_the_end_of_a_stream_passes_too(proxy: Proxy, client: socket.socket) -> None:
    client.sendall(b"a")
    client.shutdown(socket.SHUT_WR)
    assert received(client, 2) == b"b"


def test_a_slow_way_brings_everything_in_small_pieces(proxy: Proxy, client: socket.socket) -> None:
    pieces: list[int] = []
    proxy.seen = lambda way, data: pieces.append(len(data))
    proxy.slow(50_000, *BOTH)
    client.sendall(bytes(5000))
    assert received(client, 5000) == b"\1" * 5000
    assert len(pieces) >= 10 and max(pieces) <= 1000


def test_bytes_are_changed_on_their_way(proxy: Proxy, client: socket.socket) -> None:
    proxy.change = lambda way, data: data.upper() if way is Way.BACK else data
    client.sendall(b"abc")
    assert received(client, 3) == b"BCD"


def test_a_connection_ends_where_a_change_ends_it(proxy: Proxy, client: socket.socket) -> None:
    proxy.change = lambda way, data: None if way is Way.BACK else data
    client.sendall(b"abc")
    assert received(client, 1) == b""


def test_nobody_behind_it_is_a_connection_that_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()
    proxy = Proxy(address)
    with socket.create_connection(("127.0.0.1", proxy.port), PATIENCE_S) as sock:
        sock.settimeout(PATIENCE_S)
        assert sock.recv(1) == b""
    proxy.close()


def test_closing_frees_who_waits(proxy: Proxy, client: socket.socket) -> None:
    client.sendall(b"a")
    assert received(client, 1) == b"b"
    proxy.shut(*BOTH)
    client.sendall(b"x")
    kept(proxy, Way.THERE, 1)
    proxy.close()
    assert client.recv(1) == b""
