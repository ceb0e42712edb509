"""What a thread sleeps on: a bell that others ring, and descriptors that may have news."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable


class Doorbell:
    """``ring`` from any thread, everything else from the one that sleeps; closed by whoever knows that nobody
    rings or sleeps any more."""

    def __init__(self) -> None:
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._filenos: tuple[int, ...] = ()
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)

    def ring(self) -> None:
        """End the sleep that is under way, or else the next one."""
        os.eventfd_write(self._bell, 1)

    def watch(self, filenos: Iterable[int]) -> None:
        """Sleep until one of these turns readable, too; no longer on those of before."""
        wanted = tuple(filenos)
        if wanted != self._filenos:
            for fileno in set(self._filenos):
                self._poll.unregister(fileno)
            for fileno in wanted:
                self._poll.register(fileno, select.POLLIN)
            self._filenos = wanted

    def sleep(self, timeout_s: float) -> bool:
        """For so long at most, in whole milliseconds; whether there is news."""
        ready = self._poll.poll(timeout_s * 1000)
        if any(fd == self._bell for fd, _ in ready):
            os.eventfd_read(self._bell)
        return bool(ready)

    def close(self) -> None:
        """Twice is safe."""
        if self._bell >= 0:
            os.close(self._bell)
            self._bell = -1
