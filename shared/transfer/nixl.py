"""Backend ``nixl``: NIXL over UCX, for peers on other hosts. The only module that names the library,
imported when a backend is built. Owns nothing but the translation to its API.

Descriptors of the blocks of a region are prepared once, on either side, when they are first read; a read of
whole blocks then names them by index. Any other read brings descriptors of its own.

There is no progress thread: ``poll`` and ``notifications`` drive UCX, and so a peer must call them
for us to get on over transports without remote memory access.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ClassVar

from msgspec.msgpack import encode

from shared.clock import Clock, MonotonicClock
from shared.errors import ConfigError, PeerLost, TransferError
from shared.kernels.copying import BegunSums
from shared.telemetry.logs import get_logger
from shared.transfer.arena import HEADER_BYTES
from shared.transfer.base import Pieces, ReadOp, ReadState, Sums, TransferBackend
from shared.transfer.nixl_descriptors import (
    Metadata,
    NixlRegion,
    Run,
    all_descriptors,
    check_region,
    descriptors,
    indices_of,
    runs_of,
)
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
_OWN = "NIXL_INIT_AGENT"
#: How long a connection may take to be proved, and a cancelled read to end.
_PROBE_S = 1.0
_DRAIN_S = 1.0

#: Makes a transfer, not begun, of some ops.
_Make = Callable[[Sequence[ReadOp]], Any]


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


class _Peer:
    """A known remote agent, its prepared descriptors, and its reads that are not terminal yet."""

    def __init__(self, described: Metadata) -> None:
        self.agent = described.agent
        self.first = described.regions[0]
        self.regions = {r.name: r for r in described.regions}
        self.lists: dict[tuple[str, int], Any] = {}
        self.handles: set[_Handle] = set()
        #: The read that followed the last notification.
        self.settling: _Handle | None = None
        self.open = True


class _Handle:
    """One read; ``active`` are its transfers that are under way, ``summing`` the checksums of those that have
    landed, by the number of the first."""

    def __init__(self, peer: _Peer, target: Region, sums: Sums | None) -> None:
        self.peer = peer
        self.target = target
        self.sums = sums
        self.active: list[tuple[Any, Run]] = []
        self.summing: list[tuple[int, BegunSums]] = []
        self.failed = False
        self.state = ReadState.PENDING


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
        self._pieces: dict[str, tuple[Pieces, ...]] = {}
        self._lists: dict[tuple[str, int], Any] = {}
        self._registered: list[Any] = []
        self._peers: set[_Peer] = set()
        self._probe = Region.of("", memoryview(bytearray(HEADER_BYTES)), -1)
        self._register(self._probe)

    def _register(self, region: Region) -> None:
        rows = [(region.bytes_np.ctypes.data, region.nbytes, 0, "")]
        self._registered.append(self._agent.register_memory(rows, _DRAM, backends=["UCX"]))

    def register(self, name: str, buffer: memoryview, fd: int, pieces: Sequence[Pieces] = ()) -> None:
        region = Region.of(name, buffer, fd)
        self._register(region)
        self._release_lists(self._lists, name)
        self._regions[name], self._pieces[name] = region, tuple(pieces)

    def describe(self) -> bytes:
        regions = tuple(
            NixlRegion(r.name, r.bytes_np.ctypes.data, r.nbytes, self._pieces[r.name])
            for r in self._regions.values()
        )
        return encode(Metadata(self._name, self._agent.get_agent_metadata(), regions))

    def connect(self, peer_name: str, metadata: bytes) -> _Peer:
        described = parse_metadata(metadata, Metadata)
        if not described.regions:
            raise TransferError("malformed transfer metadata")
        for region in described.regions:
            check_region(region)
        try:
            added = self._agent.add_remote_agent(described.blob)
        except self._errors as error:
            raise PeerLost(f"{peer_name} cannot be added") from error
        peer = _Peer(described)
        self._peers.add(peer)
        if added not in (described.agent, described.agent.encode()):
            self.disconnect(peer)
            raise TransferError("malformed transfer metadata")
        handle = self._header(peer)
        deadline = self._clock.now() + _PROBE_S
        while self.poll(handle) is ReadState.PENDING and self._clock.now() < deadline:
            time.sleep(0.0002)
        if handle.state is not ReadState.DONE:
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
        return self._start(peer, source, target, ops, sums)

    def _header(self, peer: _Peer) -> _Handle:
        """Read a few bytes that nobody looks at. Raises PeerLost."""
        return self._start(peer, peer.first, self._probe, [ReadOp(0, 0, HEADER_BYTES)], None)

    def _start(
        self, peer: _Peer, source: NixlRegion, target: Region, ops: Sequence[ReadOp], sums: Sums | None
    ) -> _Handle:
        """Where the library copies at once, a run has landed before the next begins, and its checksums are
        taken during that; else all are under way together."""
        handle = _Handle(peer, target, sums)
        runs = runs_of(ops, sums)
        try:
            make = self._by_indices(peer, source, target, ops) or self._by_descriptors(peer, source, target)
            for run in runs:
                if handle.failed:
                    break
                transfer = make(run.ops)
                handle.active.append((transfer, run))
                peer.handles.add(handle)
                self._advance(handle, transfer, run, self._outcome_of(self._agent.transfer, transfer))
        except self._errors as error:
            if not handle.active:
                peer.handles.discard(handle)
                raise PeerLost("the peer cannot be read") from error
            handle.failed = True
        self._settle(handle)
        return handle

    def _outcome_of(self, call: Callable[[Any], str], transfer: Any) -> str:
        try:
            return call(transfer)
        except self._errors:  # whatever the library says, the transfer has failed
            return "ERR"

    def _by_descriptors(self, peer: _Peer, source: NixlRegion, target: Region) -> _Make:
        """What makes transfers of any ops."""
        agent, first = self._agent, int(target.bytes_np.ctypes.data)

        def make(ops: Sequence[ReadOp]) -> Any:
            ops = coalesce(ops)
            local = descriptors(first, [(op.local_offset, op.nbytes) for op in ops])
            remote = descriptors(source.address, [(op.remote_offset, op.nbytes) for op in ops])
            return agent.initialize_xfer(
                "READ", agent.get_xfer_descs(local, _DRAM), agent.get_xfer_descs(remote, _DRAM), peer.agent
            )

        return make

    def _by_indices(
        self, peer: _Peer, source: NixlRegion, target: Region, ops: Sequence[ReadOp]
    ) -> _Make | None:
        """What makes transfers of parts of ``ops``, in order; None when these are not whole pieces of one
        kind on either side."""
        remotes, locals_, sizes = zip(*ops, strict=True) if ops else ((), (), (0,))
        our_pieces = self._pieces.get(target.name, ())
        theirs = indices_of(source.pieces, remotes, sizes[0])
        ours = indices_of(our_pieces, locals_, sizes[0])
        if theirs is None or ours is None or len(set(sizes)) > 1:
            return None
        local, remote = (target.name, ours.kind), (source.name, theirs.kind)
        if local not in self._lists:
            rows = all_descriptors(target.bytes_np.ctypes.data, our_pieces[ours.kind])
            self._lists[local] = self._agent.prep_xfer_dlist(_OWN, rows, _DRAM)
        if remote not in peer.lists:
            rows = all_descriptors(source.address, source.pieces[theirs.kind])
            peer.lists[remote] = self._agent.prep_xfer_dlist(peer.agent, rows, _DRAM)
        agent, our_list, their_list = self._agent, self._lists[local], peer.lists[remote]
        begun = 0

        def make(part: Sequence[ReadOp]) -> Any:
            nonlocal begun
            taken = slice(begun, begun + len(part))
            begun = taken.stop
            return agent.make_prepped_xfer(
                "READ", our_list, ours.which[taken], their_list, theirs.which[taken]
            )

        return make

    def _release_lists(self, lists: dict[tuple[str, int], Any], *names: str) -> None:
        """Forget the prepared descriptors of these regions."""
        for key in [key for key in lists if key[0] in names]:
            self._agent.release_dlist_handle(lists.pop(key))

    def _advance(self, handle: _Handle, transfer: Any, run: Run, outcome: str) -> None:
        if outcome == "PROC":
            return
        handle.active.remove((transfer, run))
        self._free(transfer)
        sums = handle.sums
        if outcome != "DONE":
            handle.failed = True
        elif sums is not None and sums.values is not None:
            self._take_sums(handle)  # of the run before, if nobody has begun them
            pieces = [(op.local_offset, op.nbytes) for op in run.ops]
            handle.summing.append((run.first, BegunSums(handle.target.bytes_np, pieces, sums.unit)))

    def _settle(self, handle: _Handle) -> None:
        """A read ends when none of it is under way any more."""
        if not handle.active:
            self._take_sums(handle)
            handle.state = ReadState.FAILED if handle.failed else ReadState.DONE
            handle.peer.handles.discard(handle)

    def _take_sums(self, handle: _Handle) -> None:
        while handle.summing and handle.sums is not None and handle.sums.values is not None:
            first, begun = handle.summing.pop()
            found = begun.finish()
            handle.sums.values[first : first + len(found)] = found

    def _free(self, transfer: Any) -> None:
        try:
            self._agent.release_xfer_handle(transfer)
        except self._errors:  # a transfer that cannot be cancelled; its memory stays with the library
            _log.warning("nixl keeps a transfer that it could not cancel")

    def poll(self, handle: _Handle) -> ReadState:
        if handle.state is ReadState.PENDING and handle.peer.open:
            for transfer, run in tuple(handle.active):
                self._advance(handle, transfer, run, self._outcome_of(self._agent.check_xfer_state, transfer))
            self._settle(handle)
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
        # The next read would not end before the peer has taken the message: let one of nothing wait for that.
        if peer.settling is None or self.poll(peer.settling) is not ReadState.PENDING:
            peer.settling = self._header(peer)

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
        for handle in tuple(peer.handles):
            self.poll(handle)  # what has ended meanwhile is not to be cancelled
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
            for transfer, _ in handle.active:
                self._free(transfer)
        peer.handles.clear()
        self._release_lists(peer.lists, *peer.regions)

    def close(self) -> None:
        for peer in tuple(self._peers):
            self.disconnect(peer)
        self._release_lists(self._lists, *self._regions)
        while self._registered:
            self._agent.deregister_memory(self._registered.pop())
        self._regions.clear()
        self._agent = None  # the library cleans up when the last reference goes
