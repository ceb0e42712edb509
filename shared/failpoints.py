"""Named points at which a test may inject a fault; inert unless armed.

A service arms them from its configuration (``failpoints`` = "name=action[:count][,...]"); release
images leave it empty. Actions: ``kill`` (SIGKILL to the own process), ``raise`` (FailpointError),
``flip`` (only where the point's caller asks ``armed``). ``count`` = fire at the count-th hit.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

NAMES = frozenset(
    {
        "encode.commit",
        "prefill.commit",
        "commit.after_checksum",
        "xfer.after_k",
        "xfer.before_verified",
        "decode.after_emit",
        "store.before_publish",
        "free.before_release",
        "tier.before_write",
        "tier.after_write",
        "tier.before_fsync",
        "tier.before_rename",
        "tier.after_rename",
    }
)
ACTIONS = frozenset({"kill", "raise", "flip"})


class FailpointError(RuntimeError):
    """Raised by an armed ``raise`` failpoint."""


class Failpoints:
    """The failpoints of one process. Without arms every method returns at once."""

    def __init__(self, arms: Mapping[str, tuple[str, int]] | None = None) -> None:
        self._arms = dict(arms or {})
        self._hits: dict[str, int] = {}

    @classmethod
    def parse(cls, text: str) -> Failpoints:
        """Build from "name=action[:count],..."; ValueError on an unknown name or action."""
        arms: dict[str, tuple[str, int]] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, _, action = part.partition("=")
            action, _, count = action.partition(":")
            if name not in NAMES or action not in ACTIONS:
                raise ValueError(f"unknown failpoint {part!r}")
            arms[name] = (action, int(count or 1))
        return cls(arms)

    def armed(self, name: str, action: str) -> bool:
        """Whether this hit of ``name`` fires ``action``; counts the hit."""
        arm = self._arms.get(name)
        if arm is None or arm[0] != action:
            return False
        self._hits[name] = self._hits.get(name, 0) + 1
        return self._hits[name] == arm[1]

    def hit(self, name: str) -> None:
        """Fire ``kill`` or ``raise`` if armed here."""
        if not self._arms:
            return
        if self.armed(name, "kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.armed(name, "raise"):
            raise FailpointError(name)
