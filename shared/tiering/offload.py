"""The seam of a lower tier: records kept on disk, in an object store, anywhere slower than memory.

Owns the interface and its words; not what a record looks like (``record``), and not which records
are worth keeping. ``docs/tiers.md`` is written for the author of such a tier.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

#: Bytes of a record's key, whatever it holds.
KEY_BYTES = 32


class Presence(enum.Enum):
    """What a tier knows of a key right now."""

    YES = "yes"
    NO = "no"
    #: Being written, or asked for elsewhere: ask again later, or take it for a NO.
    NOT_YET = "not yet"


class StoreItem(NamedTuple):
    """A record to be kept. ``payload`` is C-contiguous; the tier only reads it."""

    key: bytes
    header: bytes
    payload: memoryview


class LoadItem(NamedTuple):
    """A record that is wanted. ``into`` is writable, C-contiguous and as long as the payload."""

    key: bytes
    into: memoryview


@dataclass(frozen=True)
class JobDone:
    """A job's end: the keys that succeeded, of those asked for. Fewer than all is a normal end.

    ``stored``: keys that the tier holds now. ``loaded``: the header of each payload that lies whole in
    its destination; what a destination holds otherwise is undefined. ``corrupt``: keys whose records did
    not verify, if the tier looks for itself; it has taken them away already.
    """

    job_id: int
    stored: tuple[bytes, ...] = ()
    loaded: Mapping[bytes, bytes] = field(default_factory=dict)
    corrupt: Collection[bytes] = ()


class OffloadTier(ABC):
    """Records by key, moved by jobs. Called from one thread, which no method but ``close`` keeps waiting.

    A job ends exactly once, in ``finished``. Until then its memoryviews belong to the tier, which may
    read or write them at any time; afterwards it never touches them again. The caller chooses job ids
    and uses none twice. Keys have ``KEY_BYTES`` bytes; one that appears twice in a job counts once.

    A tier is not trusted: it says what it could read, and whoever loads verifies header and payload
    by ``record.verify``. A record that cannot be kept or read is left out of ``JobDone``; no method
    raises because of it.
    """

    #: The tier's name in metrics and logs.
    name: str

    @abstractmethod
    def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        """One answer a key. Changes nothing: asking does not count as use."""

    @abstractmethod
    def submit_store(self, job_id: int, items: Sequence[StoreItem]) -> None:
        """Begin to keep records. Items of one chain of blocks stand in the chain's order."""

    @abstractmethod
    def submit_load(self, job_id: int, items: Sequence[LoadItem]) -> None:
        """Begin to read records. Items of one chain of blocks stand in the chain's order."""

    @abstractmethod
    def finished(self) -> list[JobDone]:
        """The jobs that ended since the last call."""

    @abstractmethod
    def set_wake(self, wake: Callable[[], None]) -> None:
        """``wake`` is called, on any thread, whenever ``finished`` may have news; it returns at once and does
        not call the tier. To be set before the first job."""

    @abstractmethod
    def remove(self, keys: Sequence[bytes]) -> None:
        """Forget records; unknown keys are ignored. A record being written is forgotten at its end."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes occupied now, what is being written included; never more than ``capacity_bytes``."""

    @property
    @abstractmethod
    def capacity_bytes(self) -> int: ...

    @property
    @abstractmethod
    def writable(self) -> bool:
        """False while the tier refuses to store (a full or broken medium); loads may go on."""

    @abstractmethod
    def close(self) -> None:
        """Wait for the jobs in flight; no destination is touched after it returns. Their ends are still
        in ``finished``. Calling it twice is safe; nothing may be submitted any more."""


class TierObserver:
    """What happens inside a tier, for metrics; every method does nothing here.

    Called on the thread that calls the tier. Reasons are from closed sets: of ``evicted`` capacity, removed,
    missing, quarantined; of ``quarantined`` those of ``record.CorruptRecord`` and io.
    """

    def stored(self, nbytes: int, seconds: float) -> None:
        """A record was written; ``nbytes`` of header and payload."""

    def loaded(self, nbytes: int, seconds: float) -> None:
        """A record was read whole and intact."""

    def evicted(self, reason: str, nbytes: int, age_s: float, idle_s: float) -> None:
        """A record is held no more: seconds since it was stored, and since it was last used."""

    def quarantined(self, reason: str) -> None:
        """A record did not verify and was put aside."""

    def write_failed(self, error: str) -> None:
        """A write failed; ``error`` is the errno's name, or ``other``."""

    def disabled(self) -> None:
        """Writes were switched off."""

    def reconciled(self, error_bytes: int) -> None:
        """The byte counter was compared with the medium and was off by so much."""
