"""A TCP proxy for one address, with faults: a direction is shut, traffic is slowed down, bytes are changed.

Owns its threads and sockets. A shut direction keeps what comes and hands it on when it is opened again: to
the two ends that is packets lost on the way and sent again, so that nothing of a partition is seen but
silence. What was kept, and what passed, is counted: the proof that a fault took effect.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from enum import Enum

_CHUNK = 64 << 10
#: A slowed direction passes what belongs to so many seconds at a time.
_TICK_S = 0.02


class Way(Enum):
    """THERE: from who connects to who listens; BACK: the answers."""

    THERE = "there"
    BACK = "back"


BOTH = frozenset(Way)


class _Gate:
    """One direction of all connections. Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = True
        self._closed = False
        self._rate = 0.0
        self._due = 0.0
        self.passed = 0
        self.kept = 0

    def set(self, *, is_open: bool | None = None, rate: float | None = None, closed: bool = False) -> None:
        with self._changed:
            self._open = self._open if is_open is None else is_open
            self._rate = self._rate if rate is None else rate
            self._closed |= closed
            self._due = 0.0
            self._changed.notify_all()

    @property
    def most(self) -> int:
        """Bytes to be taken at a time."""
        rate = self._rate
        return max(16, min(_CHUNK, int(rate * _TICK_S))) if rate else _CHUNK

    def admit(self, nbytes: int) -> bool:
        """Wait until so many bytes may pass; False when the proxy is closed."""
        with self._changed:
            if not self._open:
                self.kept += nbytes
            self._changed.wait_for(lambda: self._open or self._closed)
            if self._rate:
                self._due = max(self._due, time.monotonic()) + nbytes / self._rate
                until = self._due
                while self._due and not self._closed and (left := until - time.monotonic()) > 0:
                    self._changed.wait(left)
                self._changed.wait_for(lambda: self._open or self._closed)
            self.passed += nbytes
            return not self._closed


class Proxy:
    """Listens on a free port of ``host`` and hands every connection on to ``upstream``. Methods may be called
    from any thread; ``seen`` and ``change`` are called in the proxy's own."""

    def __init__(self, upstream: tuple[str, int], host: str = "127.0.0.1") -> None:
        self._upstream = upstream
        self._listener = socket.create_server((host, 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._gates = {way: _Gate() for way in Way}
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        #: Gets each run of bytes before it is handed on.
        self.seen: Callable[[Way, bytes], None] = lambda way, data: None
        #: What is handed on instead; None: the connection ends there.
        self.change: Callable[[Way, bytes], bytes | None] = lambda way, data: data
        self.num_connections = 0
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def shut(self, *ways: Way) -> None:
        """Let nothing through these ways."""
        for way in ways:
            self._gates[way].set(is_open=False)

    def heal(self) -> None:
        """Open every way, at full speed."""
        for gate in self._gates.values():
            gate.set(is_open=True, rate=0.0)

    def slow(self, bytes_per_second: float, *ways: Way) -> None:
        """Let no more through these ways, all connections together."""
        for way in ways:
            self._gates[way].set(rate=bytes_per_second)

    def passed(self, way: Way) -> int:
        """Bytes handed on so far."""
        return self._gates[way].passed

    def kept(self, way: Way) -> int:
        """Bytes that came while the way was shut."""
        return self._gates[way].kept

    def close(self) -> None:
        """End every connection. Calling it twice is safe."""
        self._closed = True
        for gate in self._gates.values():
            gate.set(closed=True)
        # A thread that waits for connections is woken by the shutdown, not by the close.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for sock in self._sockets:
                _end(sock)

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            threading.Thread(target=self._serve, args=(client,), name="proxy", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """The life of one connection. Towards upstream it begins once the way there is open."""
        with client:
            if not self._gates[Way.THERE].admit(0):
                return
            try:
                server = socket.create_connection(self._upstream, 1.0)
            except OSError:
                return
            server.settimeout(None)
            with server, self._known(client, server):
                for sock in (client, server):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                back = threading.Thread(
                    target=self._pump, args=(server, client, Way.BACK), name="proxy", daemon=True
                )
                back.start()
                self._pump(client, server, Way.THERE)
                back.join()

    @contextlib.contextmanager
    def _known(self, *sockets: socket.socket):  # type: ignore[no-untyped-def]
        with self._lock:
            self._sockets.update(sockets)
        if self._closed:
            for sock in sockets:
                _end(sock)
        try:
            yield
        finally:
            with self._lock:
                self._sockets.difference_update(sockets)

    def _pump(self, source: socket.socket, target: socket.socket, way: Way) -> None:
        gate = self._gates[way]
        try:
            while data := source.recv(gate.most):
                self.seen(way, data)
                changed = self.change(way, data)
                if changed is None or not gate.admit(len(data)):
                    _end(source)
                    break
                target.sendall(changed)
            else:
                gate.admit(0)  # the end of the stream takes the same way
            target.shutdown(socket.SHUT_WR)
        except OSError:
            _end(source)
            _end(target)


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
