"""Turns the engine's records into metrics, which ``shared.telemetry.metrics`` defines."""

from __future__ import annotations

from shared.scheduler.plan_builder import ScheduledStep
from shared.scheduler.sequence import Sequence
from shared.telemetry import metrics
from shared.transfer.handoff import PullOutcome
from shared.types.worker import WorkerStatus


def observe_pull(kind: str, outcome: PullOutcome) -> None:
    """Count one pull. ``kind``: kv, embedding or store."""
    backend = outcome.backend or "none"
    metrics.TRANSFER_BYTES.labels(backend, kind).inc(outcome.nbytes)
    metrics.TRANSFER_SECONDS.labels(backend, kind).observe(outcome.seconds)
    # A request that ended while its blocks were on their way is no failure.
    if not all(outcome.ok) and outcome.reason != "cancelled":
        metrics.TRANSFER_FAILURES.labels(outcome.reason or "failed").inc()
    if outcome.reason == "corrupt":
        metrics.CHECKSUM_FAILURES.labels(kind).inc(outcome.ok.count(False))


def observe_step(step: ScheduledStep, seconds: float) -> int:
    """Count one finished step; ``seconds`` the engine spent on its launch and on waiting for its result.
    Returns its tokens."""
    num_tokens = sum(len(row.token_ids) for row in step.plan.rows)
    metrics.STEPS.inc()
    metrics.STEP_SECONDS.observe(seconds)
    metrics.STEP_TOKENS.observe(num_tokens)
    return num_tokens


def observe_prompt(sequence: Sequence) -> None:
    """Count a prompt that was computed: what was looked up in the prefix cache, and what was found."""
    metrics.PREFIX_QUERIES.inc(len(sequence.request.token_ids))
    metrics.PREFIX_HITS.inc(sequence.num_cached)


def observe_status(status: WorkerStatus) -> None:
    """Set the gauges of one worker."""
    metrics.RUNNING.set(status.num_running)
    metrics.WAITING.set(status.num_waiting)
    metrics.KV_BLOCKS.labels("free").set(status.num_blocks_free)
    metrics.KV_BLOCKS.labels("used").set(status.num_blocks_held)
    metrics.KV_BLOCKS.labels("quarantined").set(status.num_blocks_quarantined)
    if status.num_blocks:
        metrics.KV_UTILISATION.set(status.num_blocks_held / status.num_blocks)
