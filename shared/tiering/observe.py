"""What happens inside of tiers, as metrics. Owns the mapping; the metrics are in ``shared.telemetry``."""

from __future__ import annotations

from shared.telemetry import metrics
from shared.tiering.offload import TierObserver


class MemoryObserver(TierObserver):
    """A tier in memory has more to say; this one does nothing."""

    def reused(self, gap_s: float) -> None:
        """Something held was used again, so long after its last use."""


class TierMetrics(MemoryObserver):
    """Counts for the tier of this name."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._reuse_gap = metrics.BLOCK_REUSE_GAP.labels(tier)

    def stored(self, nbytes: int, seconds: float) -> None:
        self._moved("store", nbytes, seconds)

    def loaded(self, nbytes: int, seconds: float) -> None:
        self._moved("load", nbytes, seconds)

    def _moved(self, direction: str, nbytes: int, seconds: float) -> None:
        metrics.TIER_BYTES.labels(self._tier, direction).inc(nbytes)
        metrics.TIER_SECONDS.labels(self._tier, direction).observe(seconds)

    def evicted(self, reason: str, nbytes: int, age_s: float, idle_s: float) -> None:
        metrics.TIER_EVICTIONS.labels(self._tier, reason).inc()
        metrics.BLOCK_LIFETIME.labels(self._tier).observe(age_s)
        metrics.BLOCK_IDLE.labels(self._tier).observe(idle_s)

    def reused(self, gap_s: float) -> None:
        self._reuse_gap.observe(gap_s)

    def quarantined(self, reason: str) -> None:
        metrics.TIER_QUARANTINED.labels(self._tier, reason).inc()
        if reason == "payload":
            metrics.CHECKSUM_FAILURES.labels(self._tier).inc()

    def write_failed(self, error: str) -> None:
        metrics.TIER_WRITE_FAILURES.labels(self._tier, error).inc()

    def disabled(self) -> None:
        metrics.TIER_DISABLED.labels(self._tier).inc()

    def reconciled(self, error_bytes: int) -> None:
        metrics.TIER_DRIFT.labels(self._tier).inc(abs(error_bytes))
