"""Runs pulls: one thread owns all backends of an agent. Owns deadlines, cancellation and when a
destination is safe again; the protocol itself is ``handoff``.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from shared.clock import Clock
from shared.errors import PeerLost, TransferError
from shared.failpoints import FailpointError, Failpoints
from shared.telemetry.logs import get_logger
from shared.transfer.agent import NUM_SLOTS, Link, Links, TransferAgent
from shared.transfer.base import ReadState, TransferBackend
from shared.transfer.doorbell import Doorbell
from shared.transfer.handoff import DirectPull, Pull, PullOutcome, PullProtocol, Step
from shared.transfer.reslice import NUM_STAGES, StagedPull
from shared.types.transfer import AgentInfo

_log = get_logger(__name__)

_T = TypeVar("_T")

# Turns without a sleep after a read has begun: on one host its answer is there sooner than a thread can wake.
_SPINS = 10
# Sleeps, in seconds. A backend without descriptors to wait on is polled: ever less often while a read
# is pending, every _HEAR_S while notifications are likely, and rarely else.
_POLL_MIN_S, _POLL_MAX_S = 0.00005, 0.001
_WATCH_S = 0.005
_HEAR_S = 0.001
_LAZY_S = 0.05
_IDLE_S = 5.0
_BUSY_S = 1.0
_SWEEP_S = 1.0


class _Lane:
    """Slots of one kind, and the pulls that wait for one."""

    def __init__(self, protocol: type[PullProtocol], slots: range) -> None:
        self.protocol = protocol
        self.free = list(slots)
        self.queued: deque[_Flight] = deque()

    @property
    def ready(self) -> bool:
        return bool(self.queued and self.free)


class _Flight:
    """A pull under way. ``handle`` is the read it waits for; ``answered`` = its outcome went out, but
    the destination is not safe yet."""

    def __init__(self, pull: Pull, lane: _Lane, now: float, deadline: float) -> None:
        self.pull = pull
        self.lane = lane
        self.started = now
        self.deadline = deadline
        self.slot = -1
        self.link: Link | None = None
        self.protocol: PullProtocol | None = None
        self.steps: Iterator[Step] = iter(())
        self.handle: Any = None
        self.answered = False


class Puller:
    """Pulls blocks for a process, and carries its notifications. Every method may be called from any
    thread and returns at once; the callbacks run in the puller's thread and must not block.

    ``deliver`` gets one outcome a pull. After one that is not terminal, ``settled`` gets its id once
    its destination can no longer be written. ``notified`` gets what peers sent.
    """

    def __init__(
        self,
        agent: TransferAgent,
        *,
        deliver: Callable[[PullOutcome], None],
        notified: Callable[[bytes], None],
        settled: Callable[[str], None],
        clock: Clock,
        deadline_s: float = 5.0,
        failpoints: Failpoints | None = None,
        verify: bool = True,
    ) -> None:
        self._agent = agent
        self._deliver = deliver
        self._notified = notified
        self._settled = settled
        self._clock = clock
        self._deadline_s = deadline_s
        self._failpoints = failpoints or Failpoints()
        self._verify = verify
        self._links = Links(agent.backends, clock, self._on_dropped)
        # A slot of scratch below NUM_STAGES goes with the stage of the same number.
        direct, staged = _Lane(DirectPull, range(NUM_STAGES, NUM_SLOTS)), _Lane(StagedPull, range(NUM_STAGES))
        self._lanes = (direct, staged)
        self._flights: dict[str, _Flight] = {}
        self._expecting = False
        self._busy_until = 0.0
        self._lull_s = _POLL_MIN_S
        self._spins = 0
        self._swept = clock.now()
        self._commands: deque[Callable[[], None]] = deque()
        self._bell = Doorbell()
        self._closing = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="puller", daemon=True)
        self._thread.start()

    def submit(self, pull: Pull) -> None:
        """Begin a pull; ``pull_id`` must be new. Its destination belongs to the transfer until a terminal
        outcome, or ``settled``. After ``close``: ignored."""
        now = self._clock.now()
        deadline_s = self._deadline_s if pull.deadline_s is None else pull.deadline_s
        lane = self._lanes[pull.reslice is not None]
        self._post(lambda: self._begin(_Flight(pull, lane, now, now + deadline_s)))

    def cancel(self, pull_id: str) -> None:
        """Ask for an early outcome; a pull that is over, or unknown, is ignored."""
        self._post(lambda: self._cancel(pull_id))

    def notify(self, producer: AgentInfo, payload: bytes) -> None:
        """Send a small message (512 bytes) to a producer; may be lost, never duplicated."""
        self._post(lambda: self._notify(producer, payload))

    def expect(self, expecting: bool) -> None:
        """Say whether peers are likely to read from us or to notify us soon (leases are out): backends
        that have to be polled are polled more often meanwhile."""
        self._post(lambda: setattr(self, "_expecting", expecting))

    def close(self) -> None:
        """Cancel everything, tear all links down, end the thread; not from a callback. Calling it twice
        is safe."""
        with self._lock:
            first, self._closing = not self._closing, True
            if first:
                self._bell.ring()
        self._thread.join()
        with self._lock:
            self._bell.close()

    def _post(self, command: Callable[[], None]) -> None:
        with self._lock:
            if not self._closing:
                self._commands.append(command)
                self._bell.ring()

    # The puller's thread, from here on.

    def _run(self) -> None:
        while not self._closing:
            if not self._guard(self._turn):
                time.sleep(_LAZY_S)  # a fault that stays must not become a busy loop
        self._guard(self._shut)

    def _turn(self) -> None:
        while self._commands:
            self._lull_s = _POLL_MIN_S
            self._guard(self._commands.popleft())
        for lane in self._lanes:
            while lane.ready:
                self._launch(lane.queued.popleft())
        now = self._clock.now()
        for flight in tuple(self._flights.values()):
            # A link that was torn down for one of them may have ended others.
            if flight.pull.pull_id in self._flights:
                self._advance(flight)
                if flight.deadline <= now:
                    self._expire(flight)
        for flight in [f for lane in self._lanes for f in lane.queued if f.deadline <= now]:
            self._expire(flight)
        self._hear(self._agent.backends)
        if now - self._swept > _SWEEP_S:
            self._swept = now
            self._links.drop_idle(lambda link: any(f.link is link for f in self._flights.values()))
        if not (self._commands or any(lane.ready for lane in self._lanes)):
            self._sleep()

    def _guard(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception:
            _log.exception("error in the transfer thread")
            return False
        return True

    def _tell(self, callback: Callable[[_T], None], value: _T) -> None:
        try:
            callback(value)
        except Exception:
            _log.exception("error in a callback of the transfer thread")

    def _begin(self, flight: _Flight) -> None:
        if not flight.pull.blocks:
            self._finish(flight, "")
        else:
            flight.lane.queued.append(flight)

    def _launch(self, flight: _Flight) -> None:
        pull = flight.pull
        try:
            flight.slot = flight.lane.free.pop()
            arenas, scratch = self._agent.arenas, self._agent.scratch
            flight.protocol = flight.lane.protocol(
                pull, arenas, scratch, flight.slot, self._failpoints, verify=self._verify
            )
            flight.steps = flight.protocol.steps()
            flight.link = self._links.get(pull.producer)
        except PeerLost:
            self._finish(flight, "peer_lost")
        except TransferError as error:
            _log.warning("a pull was refused", problem=error.message)
            self._finish(flight, "failed")
        except Exception:
            _log.exception("a pull could not begin")
            self._finish(flight, "failed")
        else:
            self._flights[pull.pull_id] = flight
            self._advance(flight)

    def _advance(self, flight: _Flight) -> None:
        """Go on until a read is pending or the pull is over."""
        link, protocol = flight.link, flight.protocol
        if link is None or protocol is None:
            return
        try:
            while self._landed(flight, link.backend):
                if flight.answered:
                    self._settle(flight)
                    return
                step = next(flight.steps, None)
                if step is None:
                    self._finish(flight, protocol.reason)
                    return
                flight.handle = link.backend.read(
                    link.peer, step.remote_region, step.local_region, step.ops, step.sums
                )
                self._spins = _SPINS
        except PeerLost:
            self._abandon(flight, "peer_lost")
        except (TransferError, FailpointError) as error:
            _log.warning("a pull failed", problem=str(error))
            self._abandon(flight, "failed")
        except Exception:
            _log.exception("a pull failed")
            self._abandon(flight, "failed")

    def _landed(self, flight: _Flight, backend: TransferBackend) -> bool:
        """Whether no read is pending. Raises PeerLost when it failed."""
        if flight.handle is None:
            return True
        state = backend.poll(flight.handle)
        if state is ReadState.PENDING:
            return False
        self._lull_s = _POLL_MIN_S
        backend.release(flight.handle)
        flight.handle = None
        if state is ReadState.FAILED:
            raise PeerLost("a read failed")
        return True

    def _abandon(self, flight: _Flight, reason: str) -> None:
        """End a pull whose link cannot be trusted any more, and all others on that link."""
        link = flight.link
        if link is not None and (flight.handle is not None or reason == "peer_lost"):
            self._links.drop(link)
        self._end(flight, reason)

    def _on_dropped(self, link: Link) -> None:
        for flight in tuple(self._flights.values()):
            if flight.link is link:
                flight.handle = None
                self._end(flight, "peer_lost")

    def _expire(self, flight: _Flight) -> None:
        """The deadline has passed: answer, then tear the link down, so that nothing lands late."""
        if flight in flight.lane.queued:
            flight.lane.queued.remove(flight)
            self._finish(flight, "timeout")
        elif self._flights.get(flight.pull.pull_id) is flight:
            self._answer_early(flight, "timeout")
            if flight.link is not None:
                self._links.drop(flight.link)

    def _cancel(self, pull_id: str) -> None:
        for flight in [f for lane in self._lanes for f in lane.queued if f.pull.pull_id == pull_id]:
            flight.lane.queued.remove(flight)
            self._finish(flight, "cancelled")
            return
        pending = self._flights.get(pull_id)
        if pending is not None:
            # Its read is left to end; a deadline that passes first ends the link.
            self._answer_early(pending, "cancelled")

    def _answer_early(self, flight: _Flight, reason: str) -> None:
        if not flight.answered:
            flight.answered = True
            self._tell(self._deliver, self._outcome(flight, reason, terminal=False))

    def _end(self, flight: _Flight, reason: str) -> None:
        if flight.answered:
            self._settle(flight)
        elif flight.pull.pull_id in self._flights:
            self._finish(flight, reason)

    def _settle(self, flight: _Flight) -> None:
        if self._forget(flight):
            self._tell(self._settled, flight.pull.pull_id)

    def _finish(self, flight: _Flight, reason: str) -> None:
        """Answer a pull whose destination is safe."""
        self._forget(flight)
        self._tell(self._deliver, self._outcome(flight, reason, terminal=True))

    def _forget(self, flight: _Flight) -> bool:
        if flight.slot >= 0:
            flight.lane.free.append(flight.slot)
            flight.slot = -1
        return self._flights.pop(flight.pull.pull_id, None) is not None

    def _outcome(self, flight: _Flight, reason: str, *, terminal: bool) -> PullOutcome:
        # Of a pull that went wrong as a whole no block counts, though some may have arrived.
        judged = flight.protocol if reason in ("", "stale", "corrupt") else None
        return PullOutcome(
            pull_id=flight.pull.pull_id,
            ok=tuple(judged.ok) if judged else (False,) * len(flight.pull.blocks),
            reason=reason,
            terminal=terminal,
            nbytes=judged.nbytes if judged else 0,
            seconds=self._clock.now() - flight.started,
            backend=flight.link.backend.name if flight.link else "",
            made=judged.made if judged else (),
        )

    def _notify(self, producer: AgentInfo, payload: bytes) -> None:
        self._busy_until = self._clock.now() + _BUSY_S
        link: Link | None = None
        try:
            link = self._links.get(producer)
            link.backend.notify(link.peer, payload)
        except TransferError as error:
            if link is not None and isinstance(error, PeerLost):
                self._links.drop(link)
            _log.debug("a notification was lost", problem=error.message)

    def _hear(self, backends: Sequence[TransferBackend]) -> bool:
        heard = False
        for backend in backends:
            for payload in backend.notifications():
                heard = True
                self._busy_until = self._clock.now() + _BUSY_S
                self._tell(self._notified, payload)
        return heard

    def _sleep(self) -> None:
        if self._flights and self._spins:
            self._spins -= 1
            os.sched_yield()
            return
        filenos = [backend.filenos() for backend in self._agent.backends]
        self._bell.watch(fileno for found in filenos for fileno in found)
        polled = [b for b, found in zip(self._agent.backends, filenos, strict=True) if not found]
        if self._flights:
            timeout_s = _WATCH_S
            if any(f.link is not None and f.link.backend in polled for f in self._flights.values()):
                # Shorter than a wait on descriptors can be.
                time.sleep(self._lull_s)
                self._lull_s = min(2 * self._lull_s, _POLL_MAX_S)
                timeout_s = 0.0
            self._bell.sleep(timeout_s)
        elif any(lane.queued for lane in self._lanes):
            self._bell.sleep(_WATCH_S)
        elif polled and (self._expecting or self._clock.now() < self._busy_until):
            self._listen(polled)
        else:
            self._bell.sleep(_LAZY_S if polled else _IDLE_S)

    def _listen(self, polled: Sequence[TransferBackend]) -> None:
        """Hear these, again and again, until there is other news; a whole turn would cost much more."""
        until = self._clock.now() + _LAZY_S
        while not (self._bell.sleep(_HEAR_S) or self._hear(polled) or self._clock.now() >= until):
            pass

    def _shut(self) -> None:
        while self._commands:
            self._guard(self._commands.popleft())
        for lane in self._lanes:
            while lane.queued:
                self._finish(lane.queued.popleft(), "cancelled")
        for flight in tuple(self._flights.values()):
            self._answer_early(flight, "cancelled")
        self._links.drop_all()
