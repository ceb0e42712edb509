"""The serving half of backend ``tcp``: one thread that streams registered bytes to whoever knows
the token. Owns the frame format; see ``tcp`` for the reading half.

Client to server: hello = magic, token. Then frames: kind, region index, count, request id, and
either ``count`` (offset, nbytes) pairs (READ) or ``count`` bytes of payload (NOTIFY). Server to
client: one byte after the hello, then for each READ its request id, its total and the bytes. A
malformed frame closes its connection and nothing else.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Mapping

from shared.transfer.regions import MAX_NOTIFY_BYTES

HELLO = struct.Struct("<8s16s")
FRAME = struct.Struct("<BBHIQ")
OP = struct.Struct("<QQ")
REPLY = struct.Struct("<QQ")
MAGIC = b"TRPTCP01"
WELCOME = b"\x01"
READ, NOTIFY = 1, 2
MAX_OPS = 4096

_MAX_CONNECTIONS = 256
#: READ frames that one connection may have waiting; then its requests stay in the kernel.
_MAX_WAITING = 32
_MAX_NOTES = 4096
_IOV = 64
_CHUNK = 4 << 20
_INBOX = 1 << 14


class _Malformed(Exception):
    """A client broke the format; its connection goes."""


class _Connection:
    """One accepted client: bytes not yet understood, and replies not yet sent."""

    def __init__(self, sock: socket.socket, token: bytes, regions: list[memoryview]) -> None:
        self.sock = sock
        self.welcome = False
        self.waiting = 0
        self.watched = selectors.EVENT_READ
        self.notes: list[bytes] = []
        self._token = token
        self._regions = regions
        self._inbox = bytearray()
        # Views of the regions, one entry a reply: its header and its pieces.
        self._replies: deque[deque[memoryview]] = deque()

    @property
    def events(self) -> int:
        reading = selectors.EVENT_READ if self.waiting < _MAX_WAITING else 0
        return reading | (selectors.EVENT_WRITE if self._replies else 0)

    def receive(self) -> None:
        """Take what has arrived. Raises _Malformed, or OSError at the end of the connection."""
        data = self.sock.recv(_INBOX)
        if not data:
            raise ConnectionResetError
        self._inbox += data
        self._understand()

    def _understand(self) -> None:
        at = 0
        while self.waiting < _MAX_WAITING:
            taken = self._hello(at) if not self.welcome else self._frame(at)
            if not taken:
                break
            at += taken
        del self._inbox[:at]

    def _hello(self, at: int) -> int:
        if len(self._inbox) - at < HELLO.size:
            return 0
        magic, token = HELLO.unpack_from(self._inbox, at)
        if magic != MAGIC or not hmac.compare_digest(token, self._token):
            raise _Malformed
        self.welcome = True
        self._replies.append(deque([memoryview(WELCOME)]))
        self.waiting += 1
        return HELLO.size

    def _frame(self, at: int) -> int:
        if len(self._inbox) - at < FRAME.size:
            return 0
        kind, region, _, count, request = FRAME.unpack_from(self._inbox, at)
        if not (kind == READ and 0 < count <= MAX_OPS and region < len(self._regions)) and not (
            kind == NOTIFY and count <= MAX_NOTIFY_BYTES
        ):
            raise _Malformed
        end = at + FRAME.size + count * (16 if kind == READ else 1)
        if len(self._inbox) < end:
            return 0
        body = bytes(self._inbox[at + FRAME.size : end])
        if kind == NOTIFY:
            self.notes.append(body)
        else:
            self._reply(request, self._regions[region], body)
        return int(end - at)

    def _reply(self, request: int, region: memoryview, body: bytes) -> None:
        # Not by numpy: most frames are short, and then its calls take longer than all the rest.
        pieces: deque[memoryview] = deque()
        total = 0
        for start, nbytes in OP.iter_unpack(body):
            if not 0 < nbytes <= region.nbytes - start:
                raise _Malformed
            pieces.append(region[start : start + nbytes])
            total += nbytes
        pieces.appendleft(memoryview(REPLY.pack(request, total)))
        self._replies.append(pieces)
        self.waiting += 1

    def send(self) -> None:
        """Send as much as fits now. Raises OSError at the end of the connection."""
        budget = _CHUNK
        while self._replies and budget > 0:
            pieces = self._replies[0]
            batch = [pieces[i] for i in range(min(len(pieces), _IOV))]
            try:
                sent = self.sock.sendmsg(batch)
            except BlockingIOError:
                return
            budget -= sent
            while sent:
                head = pieces.popleft()
                if sent < head.nbytes:
                    pieces.appendleft(head[sent:])
                sent -= min(sent, head.nbytes)
            if not pieces:
                self._replies.popleft()
                self.waiting -= 1
        self._understand()

    def close(self) -> None:
        self._replies.clear()
        self.sock.close()


class TcpServer:
    """Listens at once; serves ``regions`` (in the order of their indices) from ``start`` to ``close``.
    ``port`` 0 = any free one."""

    def __init__(self, host: str, token: bytes, port: int = 0) -> None:
        self._token = token
        self._listener = socket.create_server((host, port), backlog=64)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._stop, selectors.EVENT_READ)
        #: Readable while notifications wait.
        self.news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._notes: deque[bytes] = deque(maxlen=_MAX_NOTES)
        self._regions: list[memoryview] = []
        self._connections: dict[_Connection, None] = {}
        self._thread: threading.Thread | None = None

    def start(self, regions: Mapping[str, memoryview]) -> None:
        """Begin to serve; later calls are ignored, so all regions must be there."""
        if self._thread is None:
            self._regions = list(regions.values())
            self._thread = threading.Thread(target=self._run, name="tcp-transfer", daemon=True)
            self._thread.start()

    def take_notes(self) -> list[bytes]:
        """Notifications received since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.news)
        notes: list[bytes] = []
        while self._notes:
            notes.append(self._notes.popleft())
        return notes

    def close(self) -> None:
        """Close every connection and end the thread. Calling it twice is safe."""
        if self._stop < 0:
            return
        os.eventfd_write(self._stop, 1)
        if self._thread is not None:
            self._thread.join()
        for connection in tuple(self._connections):
            self._drop(connection)
        self._listener.close()
        self._selector.close()
        os.close(self._stop)
        os.close(self.news)
        self._stop = -1

    def _run(self) -> None:
        while True:
            for key, events in self._selector.select():
                if key.fd == self._stop:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._serve(key.data, events)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        if len(self._connections) >= _MAX_CONNECTIONS:
            # Strangers that never said hello give way, the oldest first.
            stranger = next((c for c in self._connections if not c.welcome), None)
            if stranger is None:
                sock.close()
                return
            self._drop(stranger)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection = _Connection(sock, self._token, self._regions)
        self._connections[connection] = None
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _serve(self, connection: _Connection, events: int) -> None:
        if connection not in self._connections:
            return  # dropped for another one in this very round
        try:
            if events & selectors.EVENT_READ:
                connection.receive()
            connection.send()
        except (_Malformed, OSError):
            self._drop(connection)
            return
        if connection.notes:
            # The notes first: whoever sees the event must find them.
            self._notes.extend(connection.notes)
            connection.notes = []
            os.eventfd_write(self.news, 1)
        if connection.events != connection.watched:
            connection.watched = connection.events
            self._selector.modify(connection.sock, connection.events, connection)

    def _drop(self, connection: _Connection) -> None:
        self._connections.pop(connection, None)
        self._selector.unregister(connection.sock)
        connection.close()
