"""Backend ``tcp``: needs nothing but a network. Bytes go from the peer's socket straight into the
destination. Owns the reading half; ``tcp_server`` owns the frame format and serves.

The metadata carries a 128-bit token that every connection must show. The traffic is neither
encrypted nor authenticated beyond that: bind it to a private network.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import ClassVar

from msgspec import Struct
from msgspec.msgpack import encode

from shared.clock import Entropy, SystemEntropy
from shared.errors import PeerLost, TransferError
from shared.transfer.base import Pieces, ReadOp, ReadState, Sums, TransferBackend
from shared.transfer.regions import (
    Region,
    check_ops,
    check_payload,
    coalesce,
    local_region,
    parse_metadata,
)
from shared.transfer.tcp_server import (
    FRAME,
    HELLO,
    MAGIC,
    MAX_OPS,
    NOTIFY,
    OP,
    READ,
    REPLY,
    WELCOME,
    TcpServer,
)

#: The most that one ``poll`` takes from the network, so that it stays a short call.
_POLL_BYTES = 8 << 20
#: Pieces that are received by one call.
_IOV = 64


class _ServedRegion(Struct, frozen=True):
    name: str
    nbytes: int


class _Metadata(Struct, frozen=True):
    host: str
    port: int
    token: bytes
    regions: tuple[_ServedRegion, ...]


class _Handle:
    """One read; DONE when each of its frames has been answered."""

    def __init__(self, peer: _Peer, frames: int) -> None:
        self.peer = peer
        self.state = ReadState.PENDING
        self.frames = frames


class _Answer:
    """The reply to one frame: where its bytes go."""

    def __init__(self, handle: _Handle, request: int, target: memoryview, ops: Sequence[ReadOp]) -> None:
        self.handle = handle
        self.head = REPLY.pack(request, sum(op.nbytes for op in ops))
        #: What has not arrived, in order.
        self.pieces = deque(target[op.local_offset : op.local_offset + op.nbytes] for op in ops)

    def receive(self, sock: socket.socket) -> int:
        """Take what has arrived, as far as it is of this answer."""
        received = sock.recvmsg_into([self.pieces[i] for i in range(min(len(self.pieces), _IOV))])[0]
        taken = received
        while taken:
            piece = self.pieces.popleft()
            if taken < piece.nbytes:
                self.pieces.appendleft(piece[taken:])
            taken -= min(taken, piece.nbytes)
        return received


class _Peer:
    """A connection; the answers come in the order of the requests. Closed for good on any error."""

    def __init__(self, sock: socket.socket, regions: Sequence[_ServedRegion]) -> None:
        self.sock = sock
        self.index = {r.name: (i, r.nbytes) for i, r in enumerate(regions)}
        self.answers: deque[_Answer] = deque()
        self.open = True
        self._outbox = bytearray()
        self._head = bytearray()

    def send(self, data: bytes) -> None:
        """Queue and send what fits. Raises PeerLost when the connection is gone."""
        self._outbox += data
        try:
            self._flush()
        except OSError as error:
            self.close()
            raise PeerLost("the connection to the peer broke") from error

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._outbox:
                del self._outbox[: self.sock.send(self._outbox)]

    def progress(self) -> None:
        """Take what has arrived, never blocking; a broken connection fails every open read."""
        budget = _POLL_BYTES
        try:
            self._flush()
            while self.answers and budget > 0:
                budget -= self._receive(self.answers[0])
        except BlockingIOError:
            return
        except (OSError, TransferError):
            self.close()

    def _receive(self, answer: _Answer) -> int:
        if len(self._head) < REPLY.size:
            return self._receive_head(answer)
        taken = answer.receive(self.sock)
        if not taken:
            raise ConnectionResetError
        if not answer.pieces:
            self._finish(answer)
        return taken

    def _receive_head(self, answer: _Answer) -> int:
        part = self.sock.recv(REPLY.size - len(self._head))
        if not part:
            raise ConnectionResetError
        self._head += part
        if len(self._head) == REPLY.size and self._head != answer.head:
            raise TransferError("the peer answered something else")
        return len(part)

    def _finish(self, answer: _Answer) -> None:
        self.answers.popleft()
        self._head.clear()
        answer.handle.frames -= 1
        if not answer.handle.frames and answer.handle.state is ReadState.PENDING:
            answer.handle.state = ReadState.DONE

    def close(self) -> None:
        self.open = False
        self.sock.close()
        for answer in self.answers:
            answer.handle.state = ReadState.FAILED
        self.answers.clear()


class TcpBackend(TransferBackend):
    """See the module. Bound to ``host`` and ``port`` (0 = any), which is where peers connect to, unless
    ``advertise`` ("host:port") tells them another way here."""

    name: ClassVar[str] = "tcp"

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        advertise: str = "",
        entropy: Entropy | None = None,
        connect_timeout_s: float = 0.5,
    ) -> None:
        self._token = bytes.fromhex((entropy or SystemEntropy()).hex_id())
        self._timeout_s = connect_timeout_s
        self._regions: dict[str, Region] = {}
        self._server = TcpServer(host, self._token, port)
        advertised_host, _, advertised_port = advertise.rpartition(":")
        self._address = (advertised_host or host, int(advertised_port or self._server.port))
        self._peers: set[_Peer] = set()
        self._requests = count(1)

    def register(self, name: str, buffer: memoryview, fd: int, pieces: Sequence[Pieces] = ()) -> None:
        self._regions[name] = Region.of(name, buffer, fd)

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.port

    def describe(self) -> bytes:
        self._server.start({name: region.buffer for name, region in self._regions.items()})
        regions = tuple(_ServedRegion(r.name, r.nbytes) for r in self._regions.values())
        return encode(_Metadata(*self._address, self._token, regions))

    def connect(self, peer_name: str, metadata: bytes) -> _Peer:
        described = parse_metadata(metadata, _Metadata)
        if len(described.token) != len(self._token) or not 0 < described.port < 65536:
            raise TransferError("malformed transfer metadata")
        try:
            sock = socket.create_connection((described.host, described.port), self._timeout_s)
        except (OSError, UnicodeError) as error:
            raise PeerLost(f"{peer_name} does not answer") from error
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(HELLO.pack(MAGIC, described.token))
            if sock.recv(1) != WELCOME:
                raise PeerLost(f"{peer_name} refuses the connection")
            sock.setblocking(False)
        except OSError as error:
            sock.close()
            raise PeerLost(f"{peer_name} does not answer") from error
        except PeerLost:
            sock.close()
            raise
        peer = _Peer(sock, described.regions)
        self._peers.add(peer)
        return peer

    def read(
        self,
        peer: _Peer,
        remote_region: str,
        local_region_: str,
        ops: Sequence[ReadOp],
        sums: Sums | None = None,
    ) -> _Handle:
        if not peer.open:
            raise PeerLost("the connection to the peer is closed")
        if remote_region not in peer.index:
            raise TransferError(f"the peer has no region {remote_region!r}")
        index, remote_bytes = peer.index[remote_region]
        target = local_region(self._regions, local_region_)
        check_ops(ops, remote_bytes, target.nbytes)
        ops = coalesce(ops)
        handle = _Handle(peer, -(-len(ops) // MAX_OPS))
        frames = bytearray()
        for first in range(0, len(ops), MAX_OPS):
            part = ops[first : first + MAX_OPS]
            request = next(self._requests)
            frames += FRAME.pack(READ, index, 0, len(part), request)
            frames += b"".join([OP.pack(op.remote_offset, op.nbytes) for op in part])
            peer.answers.append(_Answer(handle, request, target.buffer, part))
        if not handle.frames:
            handle.state = ReadState.DONE
        peer.send(bytes(frames))
        return handle

    def poll(self, handle: _Handle) -> ReadState:
        if handle.state is ReadState.PENDING:
            handle.peer.progress()
        return handle.state

    def release(self, handle: _Handle) -> bool:
        return handle.state is not ReadState.PENDING

    def notify(self, peer: _Peer, payload: bytes) -> None:
        check_payload(payload)
        if not peer.open:
            raise PeerLost("the connection to the peer is closed")
        peer.send(FRAME.pack(NOTIFY, 0, 0, len(payload), 0) + payload)

    def notifications(self) -> list[bytes]:
        return self._server.take_notes()

    def filenos(self) -> Sequence[int]:
        return (self._server.news, *(p.sock.fileno() for p in self._peers if p.answers))

    def disconnect(self, peer: _Peer) -> None:
        self._peers.discard(peer)
        peer.close()

    def close(self) -> None:
        for peer in tuple(self._peers):
            self.disconnect(peer)
        self._server.close()
        self._regions.clear()
