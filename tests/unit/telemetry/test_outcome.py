"""Every error is one outcome."""

from __future__ import annotations

import pytest

from shared.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    InternalError,
    ModelNotFound,
    Overloaded,
    RateLimited,
    RequestTooLarge,
    TriptychError,
    WorkerLost,
)
from shared.telemetry.outcome import outcome_of


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ContextLengthExceeded, "invalid"),
        (ModelNotFound, "invalid"),
        (RequestTooLarge, "invalid"),
        (Cancelled, "aborted"),
        (Overloaded, "rejected"),
        (RateLimited, "rejected"),
        (DeadlineExceeded, "expired"),
        (WorkerLost, "failed"),
        (InternalError, "failed"),
    ],
)
def test_outcomes(error: type[TriptychError], outcome: str) -> None:
    assert outcome_of(error("why")) == outcome
    assert outcome_of(None) == "ok"
