"""The tiers that the contract is run over. A tier from outside is loaded as an operator would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.clock import MonotonicClock
from shared.failpoints import Failpoints
from shared.tiering.disk import DiskTier
from shared.tiering.eviction import make_policy
from shared.tiering.external import load_tier
from shared.tiering.offload import OffloadTier
from tests.contract.tiering.harness import Driver

CAPACITY = 1 << 20

MakeTier = Callable[[], OffloadTier]


def disk(directory: Path) -> OffloadTier:
    policy = make_policy("lru", 100)
    return DiskTier(directory, CAPACITY, policy, clock=MonotonicClock(), failpoints=Failpoints())


def example(directory: Path) -> OffloadTier:
    options = {"directory": str(directory), "capacity_bytes": CAPACITY}
    return load_tier("docs.examples.directory_tier:DirectoryTier", options)


@pytest.fixture(params=[disk, example], ids=["disk", "example"])
def make_tier(request: pytest.FixtureRequest, tmp_path: Path) -> MakeTier:
    """Makes a tier over the test's directory; one at a time."""
    return lambda: request.param(tmp_path / "tier")


@pytest.fixture
def tier(make_tier: MakeTier) -> Iterator[OffloadTier]:
    made = make_tier()
    yield made
    made.close()
    made.close()


@pytest.fixture
def driver(tier: OffloadTier) -> Driver:
    return Driver(tier)
