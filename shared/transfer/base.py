"""The transfer seam: register, describe, connect, read, poll, notify, release. Pull only.

A backend moves bytes between registered regions of two processes. It knows no blocks, no leases
and no checksums; ``shared.transfer.handoff`` builds those on top. All methods are called from one
thread (the puller's); none may block longer than a copy of the bytes asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import Any, ClassVar, NamedTuple


class ReadState(Enum):
    """State of a read. FAILED and DONE are terminal: the backend touches the destination no more."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class ReadOp(NamedTuple):
    """Copy ``nbytes`` from an offset of the peer's region to an offset of ours."""

    remote_offset: int
    local_offset: int
    nbytes: int


class Pieces(NamedTuple):
    """Equal parts of a region that are mostly read as a whole: so many of ``nbytes`` each, side by side
    from ``offset`` on. A hint: any bytes may be read."""

    offset: int
    nbytes: int
    num_pieces: int


class Sums:
    """A wish for checksums (xxh3_64) of what a read brings: of every ``unit`` bytes of each op, in order;
    the ops are whole units. A backend may take them as the bytes land, while the cache has them, always from
    the destination; once the read is DONE they are in ``values``. None: it took none."""

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.values: list[int] | None = None


class TransferBackend(ABC):
    """One way of moving bytes. ``Peer`` and ``Handle`` are opaque to callers."""

    name: ClassVar[str]

    @abstractmethod
    def register(self, name: str, buffer: memoryview, fd: int, pieces: Sequence[Pieces] = ()) -> None:
        """Make a region readable by peers, and usable as a destination. ``buffer`` is the whole
        mapped region, valid until ``close``; ``fd`` is its memory file."""

    @abstractmethod
    def describe(self) -> bytes:
        """Metadata with which a peer can connect; opaque, at most 64 KiB; valid after ``register``."""

    @abstractmethod
    def connect(self, peer_name: str, metadata: bytes) -> Any:
        """Open a peer by its metadata, probing that it can really be read.
        Raises PeerLost when it cannot; TransferError on malformed metadata."""

    @abstractmethod
    def read(
        self,
        peer: Any,
        remote_region: str,
        local_region: str,
        ops: Sequence[ReadOp],
        sums: Sums | None = None,
    ) -> Any:
        """Start copying. Ops inside one read have no order. Raises PeerLost or TransferError
        (for offsets outside either region) without having touched the destination."""

    @abstractmethod
    def poll(self, handle: Any) -> ReadState:
        """State of a read; never blocks, never raises."""

    @abstractmethod
    def release(self, handle: Any) -> bool:
        """Forget a read. Returns True when its destination is certainly untouched from now on;
        False when a late landing is still possible (then only ``disconnect`` ends it)."""

    @abstractmethod
    def notify(self, peer: Any, payload: bytes) -> None:
        """Send a small message (at most 512 bytes) to the peer; may be lost, never duplicated.
        Raises PeerLost when the peer is known to be gone."""

    @abstractmethod
    def notifications(self) -> list[bytes]:
        """Messages received since the last call, in order of arrival; never blocks."""

    def filenos(self) -> Sequence[int]:
        """Descriptors that turn readable when ``poll`` or ``notifications`` may have news; they let
        the caller sleep. Empty: it must poll."""
        return ()

    @abstractmethod
    def disconnect(self, peer: Any) -> None:
        """Tear the connection down: afterwards no read of this peer can land any more."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect all, deregister all. Calling it twice is safe."""
