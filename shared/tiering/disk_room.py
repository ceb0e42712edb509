"""What bounds a disk tier: the bytes in its directory, and whether it may write at all.

Owns the byte counter with its cap, and the switch with its backoff; not what is evicted to make room.
"""

from __future__ import annotations

import threading

from shared.clock import Clock


class Room:
    """Bytes of a directory: files that are there and files being written. Any thread.

    A removal is announced by ``leaving`` when it is decided; then it has ``begun``, then the file has
    ``left``. Removals begin in the order of their tickets, and wait for nothing.
    """

    def __init__(self, capacity_bytes: int, used_bytes: int = 0) -> None:
        self.capacity_bytes = capacity_bytes
        #: The last removal that was decided.
        self.ticket = 0
        self._used = used_bytes
        self._announced: dict[int, None] = {}
        self._num_begun = 0
        self._changed = threading.Condition()

    @property
    def used_bytes(self) -> int:
        return self._used

    def leaving(self) -> int:
        """A removal was decided. Returns its ticket."""
        with self._changed:
            self.ticket += 1
            self._announced[self.ticket] = None
            return self.ticket

    def begun(self, ticket: int) -> None:
        """A removal has begun: ``left`` follows in any case."""
        with self._changed:
            del self._announced[ticket]
            self._num_begun += 1

    def left(self, nbytes: int) -> None:
        """A removal ended and gave so many bytes back: none when it failed."""
        with self._changed:
            self._num_begun -= 1
            self._used -= nbytes
            self._changed.notify_all()

    def take(self, nbytes: int, ticket: int) -> bool:
        """Take room for a new file. While there is too little, wait for removals that have begun and for
        those up to ``ticket``: later ones may be queued behind whoever waits. False when none is left."""
        with self._changed:
            while self._used + nbytes > self.capacity_bytes:
                if not self._num_begun and next(iter(self._announced), ticket + 1) > ticket:
                    return False
                self._changed.wait()
            self._used += nbytes
            return True

    def give(self, nbytes: int) -> None:
        """Bytes are free again."""
        with self._changed:
            self._used -= nbytes
            self._changed.notify_all()


class WriteSwitch:
    """Writes are off after a failure, and tried again with one record after a while: 1 s, then twice as
    long for each failure in a row, at most 60 s. Single-threaded."""

    FIRST_S, MAX_S = 1.0, 60.0

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._delay_s = 0.0
        self._retry_at = 0.0
        self._trying = False

    @property
    def on(self) -> bool:
        """Whether a record may be written now; the next one is a trial when writes were off."""
        return not self._delay_s or (not self._trying and self._clock.now() >= self._retry_at)

    def begin(self) -> bool:
        """A record is to be written, if this says so: ``failed`` or ``ended`` follows."""
        if not self.on:
            return False
        self._trying = bool(self._delay_s)
        return True

    def failed(self) -> bool:
        """A write failed; True when that switched writes off. Those that were under way at the time
        of the first failure count with it."""
        was_on = not self._delay_s
        if was_on or self._trying:
            self._delay_s = min(self._delay_s * 2, self.MAX_S) or self.FIRST_S
            self._retry_at = self._clock.now() + self._delay_s
        self._trying = False
        return was_on

    def ended(self, *, written: bool) -> None:
        """A write ended without a fault of the medium; once a trial is written, writes are on. One that was
        under way when an earlier one failed is no trial."""
        if written and self._trying:
            self._delay_s = 0.0
        self._trying = False
