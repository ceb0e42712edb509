"""Each request is counted once, by how it ended."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shared.telemetry import metrics
from shared.types.inference import InferenceRequest
from tests.unit.router.requests import ask_for


def counts() -> dict[str, float]:
    samples = (sample for family in metrics.REQUESTS.collect() for sample in family.samples)
    return {s.labels["outcome"]: s.value for s in samples if s.name.endswith("_total")}


@pytest.mark.parametrize(
    ("request_", "kinds", "limit", "outcome"),
    [
        (ask_for(), "epd", None, "ok"),
        (ask_for(), "epd", 1, "aborted"),
        (ask_for(n=17), "epd", None, "invalid"),
        (msgspec.structs.replace(ask_for(), prompt="x" * 5000), "epd", None, "invalid"),
        (ask_for(), "e", None, "rejected"),
        (ask_for(deadline_s=0.05), "e", None, "expired"),
    ],
)
async def test_one_request_is_one_outcome(
    make_cluster: Any, request_: InferenceRequest, kinds: str, limit: int | None, outcome: str
) -> None:
    before = counts()
    cluster = await make_cluster(kinds)
    await cluster.ask(request_, limit=limit)
    assert counts() == before | {outcome: before.get(outcome, 0) + 1}
