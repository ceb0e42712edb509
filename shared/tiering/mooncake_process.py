"""A process that holds Mooncake's client, and the messages by which it is asked.

Owns the library, so that nobody else waits for it: setting up towards a master that is gone keeps a process
from running anything for a minute and a half, closing for seconds. Bytes go through a stage, memory that
both sides map; messages through a socket, each with its length (u32, little-endian) in front. The process
ends when the socket does.
"""

from __future__ import annotations

import importlib
import mmap
import os
import signal
import socket
import struct
import sys
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

_LENGTH = struct.Struct("<I")
_MAX_BYTES = 16 << 20


class Setup(Struct, frozen=True, tag=True, array_like=True):
    """First of all. ``segment_bytes`` of this process's memory are for everybody's objects."""

    master: str
    metadata: str
    host: str
    protocol: str
    devices: str
    segment_bytes: int


class Exist(Struct, frozen=True, tag=True, array_like=True):
    """1 for each object that is there, else 0."""

    names: list[str]


class Put(Struct, frozen=True, tag=True, array_like=True):
    """Keep what lies in the stage, by offset and length; 0 for each that is kept."""

    names: list[str]
    places: list[tuple[int, int]]


class Get(Struct, frozen=True, tag=True, array_like=True):
    """Bring objects into the stage, each into a place of its own; its length for each that is there."""

    names: list[str]
    places: list[tuple[int, int]]


class Remove(Struct, frozen=True, tag=True, array_like=True):
    """0 for each that was there and is gone."""

    names: list[str]


class End(Struct, frozen=True, tag=True, array_like=True):
    """Say good-bye to the master; the last message."""


Request = Setup | Exist | Put | Get | Remove | End
#: A number for each object, negative for an error of the library's; one number of ``Setup`` and ``End``.
Reply = list[int]

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def send(channel: socket.socket, message: Request | Reply) -> None:
    """Raises OSError."""
    body = _encoder.encode(message)
    channel.sendall(_LENGTH.pack(len(body)) + body)


def receive_reply(channel: socket.socket) -> Reply:
    """Raises OSError, also when the other side has ended, and ValueError."""
    return _replies.decode(_receive(channel))


def _receive(channel: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size))
    if length > _MAX_BYTES:
        raise ValueError(f"a message of {length} bytes")
    return _exactly(channel, length)


def _exactly(channel: socket.socket, nbytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < nbytes:
        part = channel.recv(nbytes - len(parts))
        if not part:
            raise ConnectionResetError("the other side has ended")
        parts += part
    return bytes(parts)


class _Client:
    """The library's client. ``stage`` is registered with it, so that it copies nothing more than it must."""

    def __init__(self, stage: mmap.mmap) -> None:
        self._store: Any = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        self._stage = np.frombuffer(stage, np.uint8)  # keeps it mapped

    def answer(self, request: Request) -> Reply:
        match request:
            case Setup():
                return [self._setup(request)]
            case Exist():
                return list(self._store.batch_is_exist(request.names))
            case Put():
                return list(self._store.batch_put_from(request.names, *self._at(request.places)))
            case Get():
                return list(self._store.batch_get_into(request.names, *self._at(request.places)))
            case Remove():
                return list(self._store.batch_remove(request.names, True))
            case End():
                return [int(self._store.close())]

    def _setup(self, wanted: Setup) -> int:
        status = self._store.setup(
            wanted.host,
            wanted.metadata,
            wanted.segment_bytes,
            0,  # everything goes through the stage
            wanted.protocol,
            wanted.devices,
            wanted.master,
        )
        return int(status or self._store.register_buffer(self._stage.ctypes.data, self._stage.nbytes))

    def _at(self, places: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
        base = int(self._stage.ctypes.data)
        return [base + offset for offset, _ in places], [nbytes for _, nbytes in places]


def main(argv: list[str]) -> None:
    """``argv``: the file descriptors of the socket and of the stage."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for the other side
    channel = socket.socket(fileno=int(argv[0]))
    client = _Client(mmap.mmap(int(argv[1]), 0))
    try:
        while True:
            send(channel, client.answer(_requests.decode(_receive(channel))))
    except (OSError, ValueError):
        os._exit(0)  # at once: taking the library down takes its time, and nobody is there to see it


if __name__ == "__main__":
    main(sys.argv[1:])
