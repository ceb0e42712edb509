"""Backend ``mooncake``: Mooncake's transfer engine over TCP. The only module that names the library, imported
when a backend is built. Owns the stages through which its bytes come.

The engine cannot cancel a transfer, and one to a frozen peer may land at any time later. So it never gets
to know a destination: it reads into a stage of ours, in a thread a peer, and ``poll`` copies what has
landed to where it belongs. After ``disconnect`` nobody copies any more. A thread that still waits
for a frozen peer then is left alone with its stage, until the peer lives or dies.

The engine is neither encrypted nor authenticated and serves every interface: whoever reaches its ports can
read the registered memory, and write it. Use it inside a private network only.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import importlib
import mmap
import os
import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import ClassVar, NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.msgpack import encode
from numpy.typing import NDArray

from shared.clock import Entropy, SystemEntropy
from shared.errors import ConfigError, PeerLost, TransferError
from shared.telemetry.logs import get_logger
from shared.transfer.arena import HEADER_BYTES
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

_log = get_logger(__name__)

#: Stages of a peer, so that one fills while the other is emptied, and the size of each.
_NUM_STAGES = 2
_STAGE_BYTES = 4 << 20
#: More at a time than this the engine refuses.
_MAX_OPS = 64
_MAX_NOTES = 4096
#: How long a peer may take to answer the first read, and the threads of closed peers to end.
_PROBE_S = 1.0
_END_S = 1.0
_MAX_ADDRESS = 1 << 62


def _load() -> ModuleType:
    """Raises ConfigError when the library, or what it links to, is not there."""
    # Its log goes to stderr; what is not an error is left out.
    os.environ.setdefault("GLOG_minloglevel", "2")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise ConfigError(f"the mooncake transfer cannot be loaded: {error}") from error


class _Engine:
    """The process's engine. It is not stopped before the process ends: that takes a second, in which no
    thread of the process runs. Its notifications are told apart by the token of the backend they are for."""

    def __init__(self, host: str) -> None:
        self.library = _load()
        self.engine = self.library.TransferEngine()
        if self.engine.initialize(host, "P2PHANDSHAKE", "tcp", "") != 0:
            raise ConfigError(f"the mooncake transfer cannot listen at {host}")
        self.address = f"{host}:{self.engine.get_rpc_port()}"
        self.inboxes: dict[str, deque[bytes]] = {}
        self._lock = threading.Lock()

    def register(self, region: NDArray[np.uint8]) -> bool:
        return bool(self.engine.register_memory(region.ctypes.data, region.size) == 0)

    def unregister(self, region: NDArray[np.uint8]) -> None:
        self.engine.unregister_memory(region.ctypes.data)

    def take_notes(self, token: str) -> list[bytes]:
        """What has come for a token since the last call."""
        with self._lock:
            for note in self.engine.get_notifies():
                with contextlib.suppress(ValueError):  # a stranger's
                    payload = base64.b64decode(note.msg, validate=True)
                    if note.name in self.inboxes and len(payload) <= MAX_NOTIFY_BYTES:
                        self.inboxes[note.name].append(payload)
            inbox = self.inboxes[token]
            notes = list(inbox)
            inbox.clear()
            return notes


_engine = functools.cache(_Engine)


class _ServedRegion(Struct, frozen=True):
    name: str
    address: int
    nbytes: int


class _Metadata(Struct, frozen=True):
    engine: str
    token: str
    regions: tuple[_ServedRegion, ...]


class _Handle:
    """One read. ``runs``: how many of its runs have not been copied to their places."""

    def __init__(self, peer: _Peer, runs: int) -> None:
        self.peer = peer
        self.runs = runs
        self.state = ReadState.PENDING if runs else ReadState.DONE


class _Run(NamedTuple):
    """A part of a read that fits a stage: addresses there, places here."""

    handle: _Handle
    target: NDArray[np.uint8]
    remote: list[int]
    local: list[int]
    nbytes: list[int]


class _Job(NamedTuple):
    """What a peer's thread does next: fill a stage, or (without a run) send a payload."""

    stage: int
    run: _Run | None
    payload: bytes = b""


class _Peer:
    """An engine that was reached, with the thread that reads from it. All but ``_serve`` is the caller's
    thread's."""

    def __init__(self, engine: _Engine, described: _Metadata) -> None:
        self.regions = {region.name: region for region in described.regions}
        self.open = True
        self._described = described
        self._engine = engine
        self._stages = [
            np.frombuffer(mmap.mmap(-1, _STAGE_BYTES + mmap.PAGESIZE), np.uint8) for _ in range(_NUM_STAGES)
        ]
        self._free = list(range(_NUM_STAGES))
        self._waiting: deque[_Run] = deque()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._landed: queue.SimpleQueue[tuple[_Job, bool]] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name="mooncake-transfer", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        """Do the jobs in order until there are no more; the stages are this thread's to give back."""
        for stage in self._stages:
            self._engine.register(stage)
        while (job := self._jobs.get()) is not None:
            if job.run is None:
                self._send(job.payload)
            else:
                self._landed.put((job, self._fill(job.stage, job.run)))
        for stage in self._stages:
            self._engine.unregister(stage)

    def _fill(self, stage: int, run: _Run) -> bool:
        first = self._stages[stage].ctypes.data
        places = [first + at for at in _starts(run.nbytes)]
        engine = self._engine.engine
        return bool(
            engine.batch_transfer_sync_read(self._described.engine, places, run.remote, run.nbytes) == 0
        )

    def _send(self, payload: bytes) -> None:
        # A notification has to ride on a transfer: of a byte that nobody wants, to behind the stage's end.
        library, engine = self._engine.library, self._engine.engine
        note = library.TransferNotify(self._described.token, base64.b64encode(payload).decode())
        place, source = self._stages[0].ctypes.data + _STAGE_BYTES, self._described.regions[0].address
        read = library.TransferOpcode.Read
        if engine.transfer_sync(self._described.engine, place, source, 1, read, note) != 0:
            _log.debug("a notification was lost", peer=self._described.engine)

    def probe(self) -> bool:
        """Whether the start of its first region can be read in time."""
        first = self._described.regions[0]
        target = np.zeros(HEADER_BYTES, np.uint8)
        handle = _Handle(self, 1)
        self._jobs.put(_Job(0, _Run(handle, target, [first.address], [0], [HEADER_BYTES])))
        try:
            _, good = self._landed.get(timeout=_PROBE_S)
        except queue.Empty:
            return False
        return good

    def read(self, runs: Sequence[_Run]) -> None:
        self._waiting.extend(runs)
        self.progress()

    def notify(self, payload: bytes) -> None:
        self._jobs.put(_Job(0, None, payload))

    def progress(self) -> None:
        """Copy what has landed; ask for more."""
        while not self._landed.empty():
            job, good = self._landed.get()
            self._free.append(job.stage)
            if job.run is not None and job.run.handle.state is ReadState.PENDING:
                self._take(job.run, job.stage, good)
        while self._free and self._waiting:
            run = self._waiting.popleft()
            if run.handle.state is ReadState.PENDING:
                self._jobs.put(_Job(self._free.pop(), run))

    def _take(self, run: _Run, stage: int, good: bool) -> None:
        if not good:
            run.handle.state = ReadState.FAILED
            return
        staged = self._stages[stage]
        for at, local, nbytes in zip(_starts(run.nbytes), run.local, run.nbytes, strict=True):
            run.target[local : local + nbytes] = staged[at : at + nbytes]
        run.handle.runs -= 1
        if not run.handle.runs:
            run.handle.state = ReadState.DONE

    def close(self) -> None:
        """Nothing is copied any more; the thread ends when the engine lets it."""
        self.open = False
        self._waiting.clear()
        self._jobs.put(None)


def _starts(sizes: Sequence[int]) -> Iterator[int]:
    """Where pieces of these sizes begin, side by side."""
    at = 0
    for nbytes in sizes:
        yield at
        at += nbytes


def _fitting(ops: Sequence[ReadOp]) -> Iterator[list[ReadOp]]:
    """The ops, cut where need be, in groups that fit a stage."""
    group: list[ReadOp] = []
    room = _STAGE_BYTES
    for remote, local, nbytes in ops:
        done = 0
        while done < nbytes:
            part = min(nbytes - done, room)
            group.append(ReadOp(remote + done, local + done, part))
            done, room = done + part, room - part
            if not room or len(group) == _MAX_OPS:
                yield group
                group, room = [], _STAGE_BYTES
    if group:
        yield group


class MooncakeBackend(TransferBackend):
    """See the module. ``host`` is the address that peers connect to."""

    name: ClassVar[str] = "mooncake"

    def __init__(self, host: str = "127.0.0.1", *, entropy: Entropy | None = None) -> None:
        self._engine = _engine(host)
        self._token = (entropy or SystemEntropy()).hex_id()
        self._engine.inboxes[self._token] = deque(maxlen=_MAX_NOTES)
        self._regions: dict[str, Region] = {}
        self._peers: set[_Peer] = set()
        self._threads: set[threading.Thread] = set()

    def register(self, name: str, buffer: memoryview, fd: int, pieces: Sequence[Pieces] = ()) -> None:
        region = Region.of(name, buffer, fd)
        if not self._engine.register(region.bytes_np):
            raise TransferError(f"mooncake does not take the region {name!r}")
        self._regions[name] = region

    def describe(self) -> bytes:
        regions = tuple(
            _ServedRegion(r.name, r.bytes_np.ctypes.data, r.nbytes) for r in self._regions.values()
        )
        return encode(_Metadata(self._engine.address, self._token, regions))

    def connect(self, peer_name: str, metadata: bytes) -> _Peer:
        described = parse_metadata(metadata, _Metadata)
        if not described.regions or not described.engine:
            raise TransferError("malformed transfer metadata")
        for region in described.regions:
            if not (region.nbytes >= HEADER_BYTES and 0 <= region.address <= _MAX_ADDRESS - region.nbytes):
                raise TransferError("malformed transfer metadata")
        peer = _Peer(self._engine, described)
        self._threads = {thread for thread in self._threads if thread.is_alive()} | {peer.thread}
        self._peers.add(peer)
        if not peer.probe():
            self.disconnect(peer)
            raise PeerLost(f"{peer_name} cannot be read")
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
            raise PeerLost("the peer is disconnected")
        source = peer.regions.get(remote_region)
        if source is None:
            raise TransferError(f"the peer has no region {remote_region!r}")
        target = local_region(self._regions, local_region_)
        check_ops(ops, source.nbytes, target.nbytes)
        groups = list(_fitting(coalesce(ops)))
        handle = _Handle(peer, len(groups))
        peer.read(
            [
                _Run(
                    handle,
                    target.bytes_np,
                    [source.address + op.remote_offset for op in group],
                    [op.local_offset for op in group],
                    [op.nbytes for op in group],
                )
                for group in groups
            ]
        )
        return handle

    def poll(self, handle: _Handle) -> ReadState:
        if handle.state is ReadState.PENDING:
            if handle.peer.open:
                handle.peer.progress()
            else:
                handle.state = ReadState.FAILED
        return handle.state

    def release(self, handle: _Handle) -> bool:
        # Only we write to its destination, and for a read that was given up we do no more.
        if handle.state is ReadState.PENDING:
            handle.state = ReadState.FAILED
        return True

    def notify(self, peer: _Peer, payload: bytes) -> None:
        check_payload(payload)
        if not peer.open:
            raise PeerLost("the peer is disconnected")
        peer.notify(payload)

    def notifications(self) -> list[bytes]:
        return self._engine.take_notes(self._token) if self._token in self._engine.inboxes else []

    def disconnect(self, peer: _Peer) -> None:
        if peer.open:
            self._peers.discard(peer)
            peer.close()

    def close(self) -> None:
        for peer in tuple(self._peers):
            self.disconnect(peer)
        while self._threads:
            self._threads.pop().join(_END_S)
        while self._regions:
            _, region = self._regions.popitem()
            self._engine.unregister(region.bytes_np)
        self._engine.inboxes.pop(self._token, None)
