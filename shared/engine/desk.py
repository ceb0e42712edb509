"""The engine's counter for pulls: outcomes of the transfer thread come back as calls in the engine thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from shared.engine.inbox import Inbox
from shared.transfer.handoff import Pull, PullOutcome
from shared.types.transfer import AgentInfo


class PullerPort(Protocol):
    """What the desk needs of a puller."""

    def submit(self, pull: Pull) -> None: ...
    def cancel(self, pull_id: str) -> None: ...
    def notify(self, producer: AgentInfo, payload: bytes) -> None: ...


class PullDesk:
    """Matches pulls with their callbacks. Engine thread, except ``deliver``, ``settled`` and ``notified``."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._puller: PullerPort | None = None
        self._done: dict[str, Callable[[PullOutcome], None]] = {}
        self._settled: dict[str, Callable[[], None]] = {}
        self._next = 0
        #: Called in the engine thread with the payload of a peer's notification.
        self.on_notified: Callable[[bytes], None] = lambda payload: None

    def bind(self, puller: PullerPort) -> None:
        """Give the desk its puller; once, before the first pull."""
        self._puller = puller

    @property
    def puller(self) -> PullerPort:
        if self._puller is None:
            raise RuntimeError("no puller bound")
        return self._puller

    @property
    def num_outstanding(self) -> int:
        """Pulls whose destination may still be written."""
        return len(self._done) + len(self._settled)

    def new_id(self) -> str:
        """A pull id unique in this process."""
        self._next += 1
        return f"pull-{self._next}"

    def pull(self, pull: Pull, done: Callable[[PullOutcome], None], settled: Callable[[], None]) -> None:
        """Start a pull. ``done`` is called once with the outcome; ``settled`` once afterwards, when
        the destination is certainly written no more (at once for a terminal outcome)."""
        self._done[pull.pull_id] = done
        self._settled[pull.pull_id] = settled
        self.puller.submit(pull)

    def cancel(self, pull_id: str) -> None:
        """Ask for an early outcome; it still comes through ``done``."""
        self.puller.cancel(pull_id)

    def notify(self, producer: AgentInfo, payload: bytes) -> None:
        """Send a verified-commit to a producer; its lease is the backstop if it is lost."""
        self.puller.notify(producer, payload)

    # -- called from the transfer thread -------------------------------------------------------

    def deliver(self, outcome: PullOutcome) -> None:
        self._inbox.post(lambda: self._on_outcome(outcome))

    def settle(self, pull_id: str) -> None:
        self._inbox.post(lambda: self._on_settled(pull_id))

    def notified(self, payload: bytes) -> None:
        self._inbox.post(lambda: self.on_notified(payload))

    def _on_outcome(self, outcome: PullOutcome) -> None:
        done = self._done.pop(outcome.pull_id, None)
        if done is None:
            return
        done(outcome)
        if outcome.terminal:
            self._on_settled(outcome.pull_id)

    def _on_settled(self, pull_id: str) -> None:
        settled = self._settled.pop(pull_id, None)
        if settled is not None:
            settled()
