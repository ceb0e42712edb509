from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.unit.router.cluster import Cluster


@pytest.fixture
async def make_cluster() -> AsyncIterator[Callable[..., Awaitable[Cluster]]]:
    """Starts clusters; afterwards nothing may be left in them."""
    clusters: list[Cluster] = []

    async def make(kinds: str = "epd", **options: object) -> Cluster:
        cluster = Cluster(kinds, **options)  # type: ignore[arg-type]
        clusters.append(cluster)
        await cluster.start()
        return cluster

    yield make
    for cluster in clusters:
        cluster.check_clean()
        await cluster.dispatcher.workers.close()
