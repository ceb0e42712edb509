"""Backend ``nixl``: NIXL over UCX, for peers on other hosts. The only module that names the library,
imported when a backend is built. Owns nothing but the translation to its API.

There is no progress thread: ``poll`` and ``notifications`` drive UCX, and so a peer must call them
for us to get on over transports without remote memory access.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
from msgspec import Struct
from msgspec.msgpack import encode

from shared.clock import Clock, MonotonicClock
from shared.errors import ConfigError, PeerLost, TransferError
from shared.telemetry.logs import get_logger
from shared.transfer.arena import HEADER_BYTES
from shared.transfer.base import ReadOp, ReadState, TransferBackend
from shared.transfer.regions import (
    Region,
    check_ops,
    check_payload,
    coalesce,
    local_region,
    parse_metadata,
)

_log = get_logger(__name__)

_FLAVOURS = ("nixl_cu12", "nixl_cu13")
_DRAM = "DRAM"
#: How long a connection may take to be proved, and a cancelled read to end.
_PROBE_S = 1.0
_DRAIN_S = 1.0


def _load() -> ModuleType:
    """Import one flavour (two in a process do not work). Raises ConfigError when there is none."""
    # InfiniBand's user library makes a process without such hardware crash at exit.
    if not os.path.exists("/dev/infiniband"):
        os.environ.setdefault("UCX_MODULES", "^ib")
    for flavour in _FLAVOURS:
        try:
            api = importlib.import_module(f"{flavour}._api")
        except ModuleNotFoundError:
            continue
        # The library writes to stdout by itself; its messages belong in the process's own log.
        library_log = logging.getLogger("nixl")
        library_log.handlers.clear()
        library_log.propagate = True
        library_log.setLevel(logging.WARNING)
        return api
    raise ConfigError(f"the nixl transfer needs one of: {', '.join(_FLAVOURS)}")


class _NixlRegion(Struct, frozen=True):
    name: str
    address: int
    nbytes: int


class _Metadata(Struct, frozen=True):
    agent: str
    blob: bytes
    regions: tuple[_NixlRegion, ...]


class _Peer:
    """A known remote agent and its reads that are not terminal yet."""

    def __init__(self, described: _Metadata) -> None:
        self.agent = described.agent
        self.regions = {r.name: r for r in described.regions}
        self.handles: set[_Handle] = set()
        self.open = True


class _Handle:
    def __init__(self, peer: _Peer, transfer: Any) -> None:
        self.peer = peer
        self.transfer = transfer
        self.state = ReadState.PENDING


def _descriptors(address: int, offsets_and_sizes: Sequence[tuple[int, int]]) -> np.ndarray[Any, Any]:
    rows = np.zeros((len(offsets_and_sizes), 3), np.uint64)
    rows[:, :2] = offsets_and_sizes
    rows[:, 0] += np.uint64(address)
    return rows


class NixlBackend(TransferBackend):
    """See the module. ``agent_name`` must be unique among all processes: worker id + incarnation."""

    name: ClassVar[str] = "nixl"

    def __init__(self, agent_name: str, *, clock: Clock | None = None) -> None:
        api = _load()
        self._clock = clock or MonotonicClock()
        self._name = agent_name
        self._agent = api.nixl_agent(agent_name, api.nixl_agent_config(backends=[], enable_prog_thread=False))
        self._agent.create_backend("UCX", {})
        # The library's errors have no common base.
        self._errors = tuple(
            error
            for name, error in vars(api.nixlBind).items()
            if name.endswith("Error") and issubclass(error, Exception)
        )
        self._regions: dict[str, Region] = {}
        self._registered: list[Any] = []
        self._peers: set[_Peer] = set()
        self._probe = np.zeros(HEADER_BYTES, np.uint8)
        self._register(self._probe)

    def _register(self, buffer: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        rows = [(buffer.ctypes.data, buffer.size, 0, "")]
        self._registered.append(self._agent.register_memory(rows, _DRAM, backends=["UCX"]))

    def register(self, name: str, buffer: memoryview, fd: int) -> None:
        region = Region.of(name, buffer, fd)
        self._register(region.bytes_np)
        self._regions[name] = region

    def describe(self) -> bytes:
        regions = tuple(_NixlRegion(r.name, r.bytes_np.ctypes.data, r.nbytes) for r in self._regions.values())
        return encode(_Metadata(self._name, self._agent.get_agent_metadata(), regions))

    def connect(self, peer_name: str, metadata: bytes) -> _Peer:
        described = parse_metadata(metadata, _Metadata)
        if not described.regions or min(r.nbytes for r in described.regions) < HEADER_BYTES:
            raise TransferError("malformed transfer metadata")
        try:
            added = self._agent.add_remote_agent(described.blob)
        except self._errors as error:
            raise PeerLost(f"{peer_name} cannot be added") from error
        peer = _Peer(described)
        self._peers.add(peer)
        if added not in (described.agent, described.agent.encode()):
            self.disconnect(peer)
            raise TransferError("malformed transfer metadata")
        first = described.regions[0]
        op = ReadOp(0, 0, HEADER_BYTES)
        handle = self._start(peer, first.address, self._probe.ctypes.data, [op])
        deadline = self._clock.now() + _PROBE_S
        while self.poll(handle) is ReadState.PENDING and self._clock.now() < deadline:
            time.sleep(0.0002)
        if handle.state is not ReadState.DONE:
            self.disconnect(peer)
            raise PeerLost(f"{peer_name} cannot be read")
        return peer

    def read(self, peer: _Peer, remote_region: str, local_region_: str, ops: Sequence[ReadOp]) -> _Handle:
        if not peer.open:
            raise PeerLost("the peer is disconnected")
        source = peer.regions.get(remote_region)
        if source is None:
            raise TransferError(f"the peer has no region {remote_region!r}")
        target = local_region(self._regions, local_region_)
        check_ops(ops, source.nbytes, target.nbytes)
        return self._start(peer, source.address, target.bytes_np.ctypes.data, coalesce(ops))

    def _start(self, peer: _Peer, source: int, target: int, ops: Sequence[ReadOp]) -> _Handle:
        agent = self._agent
        local = _descriptors(target, [(op.local_offset, op.nbytes) for op in ops])
        remote = _descriptors(source, [(op.remote_offset, op.nbytes) for op in ops])
        try:
            transfer = agent.initialize_xfer(
                "READ", agent.get_xfer_descs(local, _DRAM), agent.get_xfer_descs(remote, _DRAM), peer.agent
            )
        except self._errors as error:
            raise PeerLost("the peer cannot be read") from error
        handle = _Handle(peer, transfer)
        peer.handles.add(handle)
        try:
            self._advance(handle, agent.transfer(transfer))
        except self._errors:  # a read that failed to start is a failed read
            self._advance(handle, "ERR")
        return handle

    def _advance(self, handle: _Handle, state: str) -> None:
        if state == "PROC":
            return
        handle.state = ReadState.DONE if state == "DONE" else ReadState.FAILED
        handle.peer.handles.discard(handle)
        self._free(handle)

    def _free(self, handle: _Handle) -> None:
        try:
            self._agent.release_xfer_handle(handle.transfer)
        except self._errors:  # a transfer that cannot be cancelled; its memory stays with the library
            _log.warning("nixl keeps a transfer that it could not cancel")

    def poll(self, handle: _Handle) -> ReadState:
        if handle.state is ReadState.PENDING and handle.peer.open:
            try:
                self._advance(handle, self._agent.check_xfer_state(handle.transfer))
            except self._errors:  # any error of the library is a failed read
                self._advance(handle, "ERR")
        return handle.state

    def release(self, handle: _Handle) -> bool:
        return self.poll(handle) is not ReadState.PENDING

    def notify(self, peer: _Peer, payload: bytes) -> None:
        check_payload(payload)
        if not peer.open:
            raise PeerLost("the peer is disconnected")
        try:
            self._agent.send_notif(peer.agent, payload)
        except self._errors as error:
            raise PeerLost("the peer takes no notifications") from error

    def notifications(self) -> list[bytes]:
        try:
            by_peer = self._agent.get_new_notifs(backends=["UCX"])
        except self._errors:  # a broken connection shows here too; its reads report it
            return []
        return [message for messages in by_peer.values() for message in messages]

    def disconnect(self, peer: _Peer) -> None:
        """Cancel what is open, then wait (bounded) until UCX reports an end for each. UCX over shared
        memory and TCP lands bytes only while this thread drives it, which ends here."""
        if not peer.open:
            return
        self._peers.discard(peer)
        try:
            self._agent.remove_remote_agent(peer.agent)
        except self._errors:  # gone already
            _log.debug("nixl knew the peer no more")
        deadline = self._clock.now() + _DRAIN_S
        while peer.handles and self._clock.now() < deadline:
            for handle in tuple(peer.handles):
                self.poll(handle)
            if peer.handles:
                time.sleep(0.0005)
        peer.open = False
        for handle in peer.handles:
            handle.state = ReadState.FAILED
            self._free(handle)
        peer.handles.clear()

    def close(self) -> None:
        for peer in tuple(self._peers):
            self.disconnect(peer)
        while self._registered:
            self._agent.deregister_memory(self._registered.pop())
        self._regions.clear()
        self._agent = None  # the library cleans up when the last reference goes
