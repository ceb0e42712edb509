"""Keeps arenas beyond their owner's life, and gives each to one owner at a time.

A keeper lives in a process that outlasts the workers (the launcher). An owner that starts claims its arena by
name and geometry; the connection over which it did so is its claim, which the kernel ends with the
process. So a worker that is frozen still owns its arena, and the one started in its place gets none. Owns the
descriptors; what is in the arenas, and whether it can still be trusted, is the owner's business.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import threading
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from shared.clock import Entropy, SystemEntropy
from shared.telemetry.logs import get_logger

_log = get_logger(__name__)

_MAX_REQUEST = 4096
_ANSWER_S = 5.0
_UCRED = struct.Struct("3i")


class _Claim(Struct, frozen=True):
    """``geometry``: a digest of everything that must be equal for old contents to mean anything."""

    name: str
    geometry: bytes


@dataclass
class _Kept:
    geometry: bytes
    fd: int
    owner: socket.socket | None = None


class Keeper:
    """Serves on an abstract socket, to processes of this user only; ``address`` is its name."""

    def __init__(self, entropy: Entropy | None = None) -> None:
        self.address = f"triptych-keeper-{(entropy or SystemEntropy()).hex_id()}"
        self._kept: dict[str, _Kept] = {}
        self._claims: dict[socket.socket, _Claim] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(b"\0" + self.address.encode())
        self._listener.listen()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let go of everything: what no living owner has mapped is gone. Calling it twice is safe."""
        if not self._thread.is_alive():
            return
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for connection in [*self._claims, self._listener]:
            connection.close()
        for kept in self._kept.values():
            os.close(kept.fd)
        self._kept.clear()
        self._claims.clear()
        self._selector.close()
        os.close(self._wake)

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == self._wake:
                    return
                try:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket):
                        self._hear(key.fileobj)
                except Exception:
                    _log.exception("error in the keeper")

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        if _UCRED.unpack(peer)[1] != os.geteuid():
            connection.close()
            return
        connection.settimeout(_ANSWER_S)
        self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: socket.socket) -> None:
        """A claim, a deposit (one descriptor), or the end of an owner."""
        try:
            data, fds, _, _ = socket.recv_fds(connection, _MAX_REQUEST, 1)
        except OSError:
            data, fds = b"", []
        if not data:
            self._end(connection)
        elif fds:
            self._deposit(connection, fds[0])
        else:
            self._claim(connection, data)

    def _claim(self, connection: socket.socket, data: bytes) -> None:
        try:
            claim = msgspec.msgpack.decode(data, type=_Claim)
        except msgspec.DecodeError:
            self._end(connection)
            return
        kept = self._kept.get(claim.name)
        if kept is not None and kept.owner is not None:
            connection.send(b"taken")
            return
        self._claims[connection] = claim
        if kept is not None and kept.geometry == claim.geometry:
            kept.owner = connection
            socket.send_fds(connection, [b"kept"], [kept.fd])
        else:
            connection.send(b"none")

    def _deposit(self, connection: socket.socket, fd: int) -> None:
        claim = self._claims.get(connection)
        kept = self._kept.get(claim.name) if claim is not None else None
        if claim is None or (kept is not None and kept.owner not in (None, connection)):
            os.close(fd)
            return
        if kept is not None:
            os.close(kept.fd)
        self._kept[claim.name] = _Kept(claim.geometry, fd, connection)
        connection.send(b"ok")

    def _end(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        claim = self._claims.pop(connection, None)
        if claim is not None and (kept := self._kept.get(claim.name)) and kept.owner is connection:
            kept.owner = None
        connection.close()


class NoKeeper(Exception):
    """There is no keeper at the address, it does not answer, or the arena has a living owner."""


class KeptClaim:
    """An owner's end: one claim, held until ``close`` or the end of the process."""

    def __init__(self, address: str, name: str, geometry: bytes) -> None:
        """Raises NoKeeper. ``fd`` is the arena's, the caller's to close, or None when nothing is kept."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._socket.settimeout(_ANSWER_S)
        try:
            self._socket.connect(b"\0" + address.encode())
            self._socket.send(msgspec.msgpack.encode(_Claim(name, geometry)))
            answer, fds, _, _ = socket.recv_fds(self._socket, 16, 1)
        except OSError as error:
            self._socket.close()
            raise NoKeeper("the keeper does not answer") from error
        if answer not in (b"kept", b"none"):
            self._socket.close()
            raise NoKeeper("the arena has an owner that lives")
        self.fd: int | None = fds[0] if fds else None

    def deposit(self, fd: int) -> None:
        """Have a new arena kept. Raises NoKeeper."""
        try:
            socket.send_fds(self._socket, [b"keep"], [fd])
            answer = self._socket.recv(16)
        except OSError as error:
            raise NoKeeper("the keeper does not answer") from error
        if answer != b"ok":
            raise NoKeeper("the keeper did not take the arena")

    def close(self) -> None:
        """Give the claim up; what is kept stays kept. Calling it twice is safe."""
        self._socket.close()
