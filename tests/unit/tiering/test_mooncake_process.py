"""The store with a Mooncake below it, as a process: one puts records there, another finds them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from services.cli.metrics_view import Samples
from shared.registry.identity import identity_of
from shared.rpc.kv_store import KvStoreStub
from shared.types.store import OfferedBlock
from tests.contract.transfer.harness import Peer, Reader
from tests.contract.transfer.peer import content
from tests.unit.kv_store.store_process import LAYOUT, StoreProcess, key
from tests.unit.tiering.mooncake_setting import Cluster

pytest.importorskip("mooncake.store", reason="mooncake is not installed", exc_type=ImportError)

NUM_BLOCKS = 4
KEYS = [key(n, g) for g in (0, 1) for n in range(NUM_BLOCKS)]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    made.start_master()
    made.start_holder()
    yield made
    made.close()


@pytest.fixture
def worker() -> Iterator[Peer]:
    made = Peer("shm")
    yield made
    made.close()


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader("shm")
    yield made
    made.close()


def stored(samples: Samples) -> bool:
    done = samples.value("triptych_kv_offload_seconds_count", tier="mooncake", direction="store")
    return done == len(KEYS)


async def test_another_store_finds_what_one_put_into_mooncake(
    model_dir: Path, free_port: int, cluster: Cluster, worker: Peer, reader: Reader
) -> None:
    tier = f"tiers=shared.tiering.mooncake:MooncakeTier?master={cluster.master}&capacity_mb=4&stage_mb=4"
    identity = identity_of(model_dir, "m", "uint64", "exact")
    producer = msgspec.structs.replace(worker.info, layout=LAYOUT)
    blocks = [OfferedBlock(key(n, g), worker.commit(g, n, 50 + n)) for g in (0, 1) for n in range(NUM_BLOCKS)]
    async with StoreProcess(model_dir, free_port, tier) as process:
        store = KvStoreStub(process.info.address)
        while not stored(await process.metrics()):  # until the tier takes some, and from second use on
            assert await store.offer(identity, producer, blocks) == len(blocks)
            await asyncio.sleep(0.02)
        await store.close()
    async with StoreProcess(model_dir, free_port, tier) as process:
        store = KvStoreStub(process.info.address)
        # A store that holds nothing learns from the first offer whose blocks it is for.
        other = [OfferedBlock(key(9, block.key.group), block.ref) for block in (blocks[0], blocks[-1])]
        assert await store.offer(identity, producer, other) == 2
        hit = await store.lookup(identity, LAYOUT, KEYS)
        while not hit.num_blocks:  # until the tier has reached its master
            hit = await store.lookup(identity, LAYOUT, KEYS)
        assert hit.num_blocks == NUM_BLOCKS
        for run in hit.runs:
            places = list(range(NUM_BLOCKS))
            outcome = await asyncio.to_thread(reader.pull, run.producer, run.group, list(run.blocks), places)
            assert outcome.reason == ""
            held = [reader.bytes_of(run.group, n) for n in places]
            assert held == [content(run.group, 50 + n) for n in places]
        hits = (await process.metrics()).value(
            "triptych_kv_offload_tiering_chunk_hits_total", tier="mooncake"
        )
        assert hits == len(KEYS)
        await store.release([hit.lease_id])
        await store.close()
