"""Records on their way from a lower tier into memory: bounded in number, verified before anybody sees them.

Owns the bound, the verification and what becomes of records that are wrong; not the blocks they fill, nor
who waits for them. A tier is not trusted (see ``offload``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.telemetry import metrics
from shared.telemetry.logs import get_logger
from shared.tiering.chain import TierChain
from shared.tiering.offload import JobDone, LoadItem
from shared.tiering.reactor import Reactor
from shared.tiering.record import CorruptRecord

_log = get_logger(__name__)

#: Records of one job: few enough that the first are verified while the last are being read.
JOB_RECORDS = 16


@dataclass(frozen=True)
class Load:
    """One wanted record. ``verify`` gets its header when the payload lies in ``into``; it runs in another
    thread, puts bytes into their place where that is not ``into``, and raises CorruptRecord unless everything
    is as it should be. ``done`` gets whether the record is good; ``into`` is the caller's again."""

    key: bytes
    into: memoryview
    verify: Callable[[bytes], None]
    done: Callable[[bool], None]


class Promotions:
    """At most ``max_records`` loads at a time."""

    def __init__(self, chain: TierChain, reactor: Reactor, max_records: int) -> None:
        self._chain = chain
        self._reactor = reactor
        self._max_records = max_records
        self._num_loading = 0

    @property
    def room(self) -> int:
        """Loads that may begin now."""
        return self._max_records - self._num_loading

    def begin(self, index: int, loads: Sequence[Load]) -> None:
        """Load records from the ``index``-th tier, in this order. No more than there is room for."""
        self._num_loading += len(loads)
        for first in range(0, len(loads), JOB_RECORDS):
            part = loads[first : first + JOB_RECORDS]
            items = [LoadItem(load.key, load.into) for load in part]
            self._chain.load(index, items, lambda end, p=part: self._loaded(index, p, end))  # type: ignore[misc]

    def _loaded(self, index: int, loads: Sequence[Load], end: JobDone) -> None:
        def verdicts() -> list[str]:
            return [_verdict(load, end) for load in loads]

        self._reactor.elsewhere(verdicts, lambda problems: self._judged(index, loads, problems))

    def _judged(self, index: int, loads: Sequence[Load], problems: Sequence[str]) -> None:
        tier = self._chain.name(index)
        for load, problem in zip(loads, problems, strict=True):
            self._num_loading -= 1
            if problem:
                metrics.PROMOTION_FAILURES.labels(tier, problem).inc()
            else:
                metrics.TIER_HITS.labels(tier).inc()
            if problem == "payload":
                metrics.CHECKSUM_FAILURES.labels(tier).inc()
            if problem not in ("", "missing", "corrupt"):  # the tier's own finding is dealt with
                _log.warning("a tier gave a record that does not verify", tier=tier, reason=problem)
                self._chain.remove(index, [load.key])
            load.done(not problem)


def _verdict(load: Load, end: JobDone) -> str:
    """What is wrong; empty when nothing is. ``corrupt``: the tier saw that itself."""
    header = end.loaded.get(load.key)
    if header is None:
        return "corrupt" if load.key in end.corrupt else "missing"
    try:
        load.verify(header)
    except CorruptRecord as error:
        return error.reason
    return ""
