"""The lower tiers behind memory, nearest first: asked together, their jobs counted and their ends heard.

Owns jobs and their callbacks, and the rule that no tier's fault becomes ours; not what is stored or loaded,
nor whether what came back is right (``promotion``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shared.telemetry import metrics
from shared.telemetry.logs import get_logger
from shared.tiering.offload import JobDone, LoadItem, OffloadTier, Presence, StoreItem

_log = get_logger(__name__)

#: Where a record is: the number of a tier, or one of these.
NOWHERE, NOT_YET = -1, -2


class TierChain:
    """One thread; ``post`` brings calls of the tiers' threads into it. Without tiers nothing is found and
    nothing is kept."""

    def __init__(self, tiers: Sequence[OffloadTier], post: Callable[[Callable[[], None]], None]) -> None:
        self._tiers = tuple(tiers)
        self._post = post
        self._next_job = 0
        self._jobs: dict[tuple[int, int], Callable[[JobDone], None]] = {}
        self._woken = False
        #: Called after news of the tiers were taken in.
        self.on_news: Callable[[], None] = lambda: None
        for tier in self._tiers:
            tier.set_wake(self._wake)

    @property
    def is_empty(self) -> bool:
        return not self._tiers

    @property
    def holds_anything(self) -> bool:
        return any(tier.num_bytes for tier in self._tiers)

    @property
    def writable(self) -> bool:
        """Whether any tier takes records."""
        return any(tier.writable for tier in self._tiers)

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    def name(self, index: int) -> str:
        return self._tiers[index].name

    def where(self, keys: Sequence[bytes]) -> list[int]:
        """For each key the first tier that has it; NOT_YET when one may have it soon, else NOWHERE."""
        places = [NOWHERE] * len(keys)
        for index, tier in enumerate(self._tiers):
            open_ = [n for n, place in enumerate(places) if place < 0]
            if not open_:
                break
            metrics.TIER_QUERIES.labels(tier.name).inc(len(open_))
            try:
                answers = tier.lookup([keys[n] for n in open_])
            except Exception:  # a tier may be anybody's code
                _log.exception("a tier does not answer", tier=tier.name)
                continue
            for n, presence in zip(open_, answers, strict=False):
                if presence is Presence.YES:
                    places[n] = index
                elif presence is Presence.NOT_YET:
                    places[n] = NOT_YET
        return places

    def load(self, index: int, items: Sequence[LoadItem], done: Callable[[JobDone], None]) -> None:
        """``done`` gets the job's end: what lies in its destination by then is perhaps not as wanted."""
        self._begin(index, lambda tier, job: tier.submit_load(job, items), done)

    def store(self, items: Sequence[StoreItem], done: Callable[[frozenset[bytes]], None]) -> None:
        """Give records to every tier that takes some; ``done`` gets the keys that one of them or more holds,
        once none looks at the payloads any more."""
        takers = [index for index, tier in enumerate(self._tiers) if tier.writable]
        stored: set[bytes] = set()
        left = len(takers)

        def one_done(end: JobDone) -> None:
            nonlocal left
            stored.update(end.stored)
            left -= 1
            if not left:
                done(frozenset(stored))

        if not takers:
            done(frozenset())
        for index in takers:
            self._begin(index, lambda tier, job: tier.submit_store(job, items), one_done)

    def remove(self, index: int, keys: Sequence[bytes]) -> None:
        """Make a tier forget records."""
        try:
            self._tiers[index].remove(keys)
        except Exception:  # as above
            _log.exception("a tier does not remove", tier=self.name(index))

    def poll(self) -> None:
        """Take in what ended; called by itself when a tier has news."""
        self._woken = False
        for index, tier in enumerate(self._tiers):
            try:
                ended = tier.finished()
            except Exception:  # as above
                _log.exception("a tier does not say what ended", tier=tier.name)
                continue
            for end in ended:
                if callback := self._jobs.pop((index, end.job_id), None):
                    callback(end)
        self.on_news()

    def close(self) -> None:
        """Wait for the jobs in flight and hear of their ends. Calling it twice is safe."""
        for tier in self._tiers:
            tier.close()
        self.poll()

    def _begin(
        self, index: int, submit: Callable[[OffloadTier, int], None], done: Callable[[JobDone], None]
    ) -> None:
        self._next_job += 1
        job_id = self._next_job
        self._jobs[index, job_id] = done
        try:
            submit(self._tiers[index], job_id)
        except Exception:  # as above
            _log.exception("a tier refused a job", tier=self.name(index))
            del self._jobs[index, job_id]
            done(JobDone(job_id))

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._post(self.poll)
