"""Backend ``shm``: peers on one host map each other's memory files read-only; a read is a copy.

A peer is found by pid and descriptor number and proved by the nonce in its arena, so a recycled
pid, or the same pid in another container, is refused. Its death is seen through a pidfd; a frozen
peer is readable, and the fences of ``handoff`` protect the reader. Notifications are datagrams.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import mmap
import os
import select
import socket
from collections import deque
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from msgspec import Struct
from msgspec.msgpack import encode
from numpy.typing import NDArray

from shared.clock import Entropy, SystemEntropy
from shared.errors import PeerLost, TransferError
from shared.kernels.copying import copy_and_sum, copy_pieces, prepare_copies
from shared.transfer.arena import HEADER_BYTES, READER_SEALS, parse_header
from shared.transfer.base import Pieces, ReadOp, ReadState, Sums, TransferBackend
from shared.transfer.regions import (
    MAX_NOTIFY_BYTES,
    Region,
    check_ops,
    check_payload,
    coalesce,
    local_region,
    parse_metadata,
)

_TOKEN_BYTES = 16
# The system queues few datagrams a socket; more wait here, then the oldest are lost.
_OUTBOX = 1024


class _SharedRegion(Struct, frozen=True):
    name: str
    fd: int
    nbytes: int
    nonce: str


class _Metadata(Struct, frozen=True):
    pid: int
    notify: bytes
    token: bytes
    regions: tuple[_SharedRegion, ...]


class _Peer:
    """One opened peer; empty ``regions`` once disconnected."""

    def __init__(self, metadata: _Metadata, pidfd: int) -> None:
        self.address = b"\0" + metadata.notify
        self.token = metadata.token
        self.pidfd = pidfd
        self._watch = select.poll()
        self._watch.register(pidfd, select.POLLIN)
        self.regions: dict[str, NDArray[np.uint8]] = {}
        self.outbox: deque[bytes] = deque(maxlen=_OUTBOX)

    def alive(self) -> bool:
        """Whether the process runs (or is frozen)."""
        return self.pidfd >= 0 and not self._watch.poll(0)

    def close(self) -> None:
        self.regions.clear()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def _map_region(pid: int, region: _SharedRegion) -> NDArray[np.uint8]:
    """Map a peer's region read-only; raises OSError or PeerLost when it is not the one described."""
    fd = os.open(f"/proc/{pid}/fd/{region.fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if (
            fcntl.fcntl(fd, fcntl.F_GET_SEALS) & READER_SEALS != READER_SEALS
            or os.fstat(fd).st_size != region.nbytes
        ):
            raise PeerLost("the memory of the peer is not what it announced")
        mapped = mmap.mmap(fd, region.nbytes, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    bytes_np = np.frombuffer(mapped, np.uint8)
    header = parse_header(bytes_np[:HEADER_BYTES].tobytes())
    if not hmac.compare_digest(header.nonce, region.nonce):
        raise PeerLost("the memory of the peer is another's")
    return bytes_np


class ShmBackend(TransferBackend):
    """See the module. Regions must be arenas. Reads are inline and terminal when ``read`` returns."""

    name: ClassVar[str] = "shm"

    def __init__(self, entropy: Entropy | None = None) -> None:
        entropy = entropy or SystemEntropy()
        prepare_copies()
        self._regions: dict[str, Region] = {}
        self._peers: set[_Peer] = set()
        self._token = bytes.fromhex(entropy.hex_id())
        self._address = f"triptych-{entropy.hex_id()}".encode()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(b"\0" + self._address)

    def register(self, name: str, buffer: memoryview, fd: int, pieces: Sequence[Pieces] = ()) -> None:
        self._regions[name] = Region.of(name, buffer, fd)

    def describe(self) -> bytes:
        regions = tuple(
            _SharedRegion(r.name, r.fd, r.nbytes, parse_header(r.bytes_np[:HEADER_BYTES].tobytes()).nonce)
            for r in self._regions.values()
        )
        return encode(_Metadata(os.getpid(), self._address, self._token, regions))

    def connect(self, peer_name: str, metadata: bytes) -> _Peer:
        described = parse_metadata(metadata, _Metadata)
        if described.pid <= 0 or not described.regions or len(described.token) != _TOKEN_BYTES:
            raise TransferError("malformed transfer metadata")
        try:
            peer = _Peer(described, os.pidfd_open(described.pid))
        except OSError as error:
            raise PeerLost(f"{peer_name} is not on this host") from error
        try:
            for region in described.regions:
                peer.regions[region.name] = _map_region(described.pid, region)
            # Still the process whose descriptors were opened: its pid was not reused meanwhile.
            if not peer.alive():
                raise PeerLost(f"{peer_name} has died")
        except (OSError, ValueError) as error:
            peer.close()
            raise PeerLost(f"{peer_name} cannot be mapped") from error
        except PeerLost:
            peer.close()
            raise
        self._peers.add(peer)
        return peer

    def read(
        self,
        peer: _Peer,
        remote_region: str,
        local_region_: str,
        ops: Sequence[ReadOp],
        sums: Sums | None = None,
    ) -> ReadState:
        source = peer.regions.get(remote_region)
        if not peer.alive():
            raise PeerLost("the peer is gone")
        if source is None:
            raise TransferError(f"the peer has no region {remote_region!r}")
        target = local_region(self._regions, local_region_).bytes_np
        check_ops(ops, source.size, target.size)
        if sums is None:
            copy_pieces(target, source, coalesce(ops))
        else:
            sums.values = copy_and_sum(target, source, ops, sums.unit)
        return ReadState.DONE if peer.alive() else ReadState.FAILED

    def poll(self, handle: ReadState) -> ReadState:
        return handle

    def release(self, handle: ReadState) -> bool:
        return True

    def notify(self, peer: _Peer, payload: bytes) -> None:
        check_payload(payload)
        if not peer.alive():
            raise PeerLost("the peer is gone")
        peer.outbox.append(peer.token + payload)
        self._flush(peer)

    def notifications(self) -> list[bytes]:
        for peer in self._peers:
            if peer.outbox:
                with contextlib.suppress(PeerLost):
                    self._flush(peer)
        received: list[bytes] = []
        while True:
            try:
                message = self._socket.recv(_TOKEN_BYTES + MAX_NOTIFY_BYTES)
            except BlockingIOError:
                return received
            if hmac.compare_digest(message[:_TOKEN_BYTES], self._token):
                received.append(message[_TOKEN_BYTES:])

    def filenos(self) -> Sequence[int]:
        # With messages waiting for room at a peer there is nothing to sleep on.
        return () if any(p.outbox for p in self._peers) else (self._socket.fileno(),)

    def disconnect(self, peer: _Peer) -> None:
        self._peers.discard(peer)
        peer.close()

    def close(self) -> None:
        for peer in tuple(self._peers):
            self.disconnect(peer)
        self._regions.clear()
        self._socket.close()

    def _flush(self, peer: _Peer) -> None:
        while peer.outbox:
            try:
                self._socket.sendto(peer.outbox[0], peer.address)
            except BlockingIOError:
                return
            except OSError as error:
                peer.outbox.clear()
                if error.errno == errno.EBADF:
                    raise TransferError("the backend is closed") from error
                raise PeerLost("the peer takes no notifications") from error
            peer.outbox.popleft()
