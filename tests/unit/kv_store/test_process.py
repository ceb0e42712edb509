"""The store as a process of its own: a worker's blocks outlive the worker."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shared.registry.identity import identity_of
from shared.rpc.kv_store import KvStoreStub
from shared.types.store import OfferedBlock
from tests.contract.transfer.harness import Peer, Reader
from tests.contract.transfer.peer import content
from tests.unit.kv_store.store_process import ENVIRONMENT, EPOCH, LAYOUT, StoreProcess, key


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


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


async def test_blocks_outlive_their_worker(
    model_dir: Path, free_port: int, worker: Peer, reader: Reader
) -> None:
    async with StoreProcess(model_dir, free_port) as process:
        await blocks_outlive_their_worker(process, model_dir, worker, reader)


async def blocks_outlive_their_worker(
    process: StoreProcess, model_dir: Path, worker: Peer, reader: Reader
) -> None:
    identity = identity_of(model_dir, "m", "uint64", "exact")
    producer = msgspec.structs.replace(worker.info, layout=LAYOUT)
    blocks = [OfferedBlock(key(n, g), worker.commit(g, n, 50 + n)) for g in (0, 1) for n in range(3)]
    store = KvStoreStub(process.info.address)
    stranger = msgspec.structs.replace(identity, revision="other")
    assert await store.offer(stranger, producer, blocks) == 0
    worker.call("flip", 0, 2, 77)
    # Five of six: the damaged one is not kept.
    assert await store.offer(identity, producer, blocks) == 5
    worker.kill()
    late = [OfferedBlock(key(9, g), b.ref) for g, b in enumerate(blocks[:2])]
    assert await store.offer(identity, producer, late) == 0

    keys = [key(n, g) for g in (0, 1) for n in range(3)]
    assert await store.lookup(stranger, LAYOUT, keys) == await store.lookup(identity, LAYOUT, keys[1:2])
    hit = await store.lookup(identity, LAYOUT, keys)
    assert hit.num_blocks == 2
    for run in hit.runs:
        assert run.producer.epoch == EPOCH
        outcome = await asyncio.to_thread(reader.pull, run.producer, run.group, list(run.blocks), [0, 1])
        assert outcome.reason == ""
        assert [reader.bytes_of(run.group, n) for n in (0, 1)] == [content(run.group, 50 + n) for n in (0, 1)]
    assert (await store.status())[1].num_leases == 1
    await store.release([hit.lease_id])
    info, status = await store.status()
    assert info.identity == identity
    assert (status.num_leases, status.num_blocks_held, status.num_blocks_quarantined) == (0, 0, 0)
    assert status.num_blocks_free == status.num_blocks > 0
    await store.close()


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("model.name=m", "config.json"),
        ("tiers=nothing.here:Tier", "tier 'nothing.here:Tier' cannot be imported"),
        ("disk.path=/proc/nothing", "the disk tier cannot use"),
    ],
)
def test_a_configuration_that_cannot_work_ends_with_status_2(
    repo_root: Path, tmp_path: Path, setting: str, complaint: str
) -> None:
    if setting != "model.name=m":
        (tmp_path / "config.json").write_text("{}")
    argv = [sys.executable, "-m", "services.kv_store", "--set", f"model.path={tmp_path}", "--set", setting]
    done = subprocess.run(argv, cwd=repo_root, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert complaint in done.stderr
