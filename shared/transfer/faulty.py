"""Backend wrapper that injects faults by a fixed schedule; for tests and chaos runs, never by default.

It looks like the backend it wraps (same name, same metadata), so only one side of a connection
needs it. Owns no bytes: it delays, damages or withholds what the inner backend does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

from msgspec import Struct

from shared.errors import PeerLost
from shared.transfer.base import Pieces, ReadOp, ReadState, Sums, TransferBackend


class FaultKind(Enum):
    """What happens to one read.

    DROP: never starts, never ends. DELAY: starts after ``amount`` polls. TRUNCATE: the first
    ``amount`` bytes alone are copied, and it claims to be done. FLIP: bit ``amount`` (of the bytes
    read, in order of the ops) turns over after landing. FREEZE: pending until the peer is
    disconnected, and till then it may land late, released or not: when ``land`` is called, or at
    poll number ``amount`` (0: never by itself). FAIL: ends as failed. LOSE: the peer is gone when it starts.
    REVERSE: its ops are done last first, each of them as a read of its own. OVERTAKEN: starts when the next
    ``amount`` reads have ended. RESTART: the peer starts anew before it starts.
    """

    DROP = "drop"
    DELAY = "delay"
    TRUNCATE = "truncate"
    FLIP = "flip"
    FREEZE = "freeze"
    FAIL = "fail"
    LOSE = "lose"
    REVERSE = "reverse"
    OVERTAKEN = "overtaken"
    RESTART = "restart"


#: Faults of reads that start later than asked.
_LATE = (FaultKind.DELAY, FaultKind.FREEZE, FaultKind.OVERTAKEN)


class Fault(Struct, frozen=True):
    kind: FaultKind
    amount: int = 0


class _Handle:
    """Read ``number`` under a fault. ``args`` is what starts the inner read, which ``inner`` then is;
    ``rest`` are ops that wait for it."""

    def __init__(
        self, number: int, fault: Fault | None, peer: Any, args: tuple[str, str, Sequence[ReadOp]]
    ) -> None:
        self.number = number
        self.rest: list[ReadOp] = []
        self.fault = fault
        self.peer = peer
        self.args = args
        self.inner: Any = None
        self.polls = 0
        self.state = ReadState.PENDING


def _truncated(ops: Sequence[ReadOp], nbytes: int) -> list[ReadOp]:
    kept: list[ReadOp] = []
    for op in ops:
        if nbytes <= 0:
            break
        kept.append(op._replace(nbytes=min(op.nbytes, nbytes)))
        nbytes -= op.nbytes
    return kept


class FaultyBackend(TransferBackend):
    """Reads are counted from 0; ``schedule`` maps a count to its fault, and ``injected`` is called with
    the fault when it takes effect. Notifications are counted likewise; ``lost_notes`` are never sent.
    ``restart`` is what a RESTART calls. ``ended`` are the numbers of the reads that ended well, in order."""

    def __init__(
        self,
        inner: TransferBackend,
        schedule: Mapping[int, Fault],
        *,
        lost_notes: frozenset[int] = frozenset(),
        injected: Callable[[Fault], None] = lambda fault: None,
        restart: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = inner.name  # type: ignore[misc]  # a wrapper has the name of what it wraps
        self.inner = inner
        self._num_reads = 0
        self._injected = injected
        self._restart = restart
        self.ended: list[int] = []
        self._num_notes = 0
        self._schedule = dict(schedule)
        self._lost_notes = lost_notes
        self._buffers: dict[str, memoryview] = {}
        self._frozen: list[_Handle] = []

    def inject(self, fault: Fault, after: int = 0) -> None:
        """Let it happen to the next read but ``after``. Not while one may begin."""
        self._schedule[self._num_reads + after] = fault

    def register(self, name: str, buffer: memoryview, fd: int, pieces: Sequence[Pieces] = ()) -> None:
        self._buffers[name] = buffer
        self.inner.register(name, buffer, fd, pieces)

    def describe(self) -> bytes:
        return self.inner.describe()

    def connect(self, peer_name: str, metadata: bytes) -> Any:
        return self.inner.connect(peer_name, metadata)

    def read(
        self,
        peer: Any,
        remote_region: str,
        local_region: str,
        ops: Sequence[ReadOp],
        sums: Sums | None = None,
    ) -> _Handle:
        # Checksums are not passed on: what this damages, it damages after the inner backend is done.
        number = self._num_reads
        fault = self._schedule.get(number)
        self._num_reads += 1
        if fault is not None:
            self._injected(fault)
        handle = _Handle(number, fault, peer, (remote_region, local_region, ops))
        if fault is not None and fault.kind is FaultKind.LOSE:
            raise PeerLost("the peer is gone (injected)")
        if fault is not None and fault.kind is FaultKind.RESTART:
            self._restart()
        if fault is None or fault.kind in (FaultKind.FLIP, FaultKind.RESTART):
            self._start(handle)
        elif fault.kind is FaultKind.REVERSE:
            handle.rest = list(ops)
            self._start_last(handle)
        elif fault.kind is FaultKind.TRUNCATE:
            handle.args = (remote_region, local_region, _truncated(ops, fault.amount))
            self._start(handle)
        elif fault.kind is FaultKind.FAIL:
            handle.state = ReadState.FAILED
        elif fault.kind is FaultKind.FREEZE:
            self._frozen.append(handle)
        return handle

    def _start(self, handle: _Handle) -> None:
        handle.inner = self.inner.read(handle.peer, *handle.args)

    def _start_last(self, handle: _Handle) -> None:
        remote_region, local_region, _ = handle.args
        handle.args = (remote_region, local_region, [handle.rest.pop()])
        self._start(handle)

    def _is_due(self, handle: _Handle, fault: Fault) -> bool:
        """Whether a read that is late shall start now."""
        if fault.kind is FaultKind.OVERTAKEN:
            overtakers = range(handle.number + 1, handle.number + 1 + fault.amount)
            return all(number in self.ended for number in overtakers)
        handle.polls += 1
        return handle.polls >= fault.amount and (fault.amount > 0 or fault.kind is FaultKind.DELAY)

    def poll(self, handle: _Handle) -> ReadState:
        if handle.state is not ReadState.PENDING:
            return handle.state
        fault = handle.fault
        if fault is not None and fault.kind in _LATE and handle.inner is None and self._is_due(handle, fault):
            self._go_on(handle, self._start)
        if handle.inner is not None and handle.state is ReadState.PENDING:
            state = self.inner.poll(handle.inner)
            if state is ReadState.DONE and handle.rest:
                self.inner.release(handle.inner)
                self._go_on(handle, self._start_last)
                return handle.state
            handle.state = state
            if state is ReadState.DONE:
                self.ended.append(handle.number)
                if fault is not None and fault.kind is FaultKind.FLIP:
                    self._flip(handle, fault.amount)
        return handle.state

    def _go_on(self, handle: _Handle, start: Callable[[_Handle], None]) -> None:
        try:
            start(handle)
        except PeerLost:
            handle.state = ReadState.FAILED

    def _flip(self, handle: _Handle, bit: int) -> None:
        _, local_region, ops = handle.args
        byte, bit = divmod(bit, 8)
        for op in ops:
            if byte < op.nbytes:
                self._buffers[local_region][op.local_offset + byte] ^= 1 << bit
                return
            byte -= op.nbytes

    def land(self) -> int:
        """Let the frozen reads of connected peers land now, to the end; returns how many did."""
        landed = 0
        for handle in self._frozen:
            self._start(handle)
            while self.poll(handle) is ReadState.PENDING:
                pass
            landed += handle.state is ReadState.DONE
        self._frozen.clear()
        return landed

    def release(self, handle: _Handle) -> bool:
        if handle.state is not ReadState.PENDING:
            return True
        if handle.inner is not None:
            return self.inner.release(handle.inner)
        # Not started, and only a frozen one still may.
        handle.state = ReadState.FAILED if handle not in self._frozen else ReadState.PENDING
        return handle.state is ReadState.FAILED

    def notify(self, peer: Any, payload: bytes) -> None:
        number = self._num_notes
        self._num_notes += 1
        if number not in self._lost_notes:
            self.inner.notify(peer, payload)

    def notifications(self) -> list[bytes]:
        return self.inner.notifications()

    def disconnect(self, peer: Any) -> None:
        for handle in [h for h in self._frozen if h.peer is peer]:
            handle.state = ReadState.FAILED
            self._frozen.remove(handle)
        self.inner.disconnect(peer)

    def close(self) -> None:
        for handle in self._frozen:
            handle.state = ReadState.FAILED
        self._frozen.clear()
        self.inner.close()
