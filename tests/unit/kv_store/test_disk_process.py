"""The store with a disk tier, as a process that is stopped, killed and started anew over one directory."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shared.errors import WorkerLost
from shared.failpoints import NAMES
from shared.registry.identity import identity_of
from shared.rpc.kv_store import KvStoreStub
from shared.types.identity import IdentityKey
from shared.types.store import OfferedBlock, StoreHit
from tests.contract.transfer.harness import Peer, Reader
from tests.contract.transfer.peer import content
from tests.unit.kv_store.store_process import LAYOUT, StoreProcess, key
from tests.unit.tiering.disk_setting import directory_bytes, quarantined, record_files

NUM_BLOCKS = 4
KEYS = [key(n, g) for g in (0, 1) for n in range(NUM_BLOCKS)]
TIER_FAILPOINTS = sorted(name for name in NAMES if name.startswith("tier."))


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def identity(model_dir: Path) -> IdentityKey:
    return identity_of(model_dir, "m", "uint64", "exact")


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


class Directory:
    """What a test knows of the tier's directory, and the store over it."""

    def __init__(self, model_dir: Path, metrics_port: int) -> None:
        self.path = model_dir / "disk"
        self._start = model_dir, metrics_port

    def store(self, *settings: str) -> StoreProcess:
        return StoreProcess(*self._start, f"disk.path={self.path}", "disk.capacity_mb=1", *settings)


@pytest.fixture
def directory(model_dir: Path, free_port: int) -> Directory:
    return Directory(model_dir, free_port)


async def use_twice(process: StoreProcess, identity: IdentityKey, worker: Peer) -> None:
    """Offer, and look up once: what was used twice goes to the disk."""
    producer = msgspec.structs.replace(worker.info, layout=LAYOUT)
    blocks = [OfferedBlock(key(n, g), worker.commit(g, n, 50 + n)) for g in (0, 1) for n in range(NUM_BLOCKS)]
    store = KvStoreStub(process.info.address)
    assert await store.offer(identity, producer, blocks) == len(blocks)
    try:
        await store.release([(await store.lookup(identity, LAYOUT, KEYS)).lease_id])
    except WorkerLost:
        assert process.process.wait(10) == -signal.SIGKILL
    await store.close()


async def look_up(process: StoreProcess, identity: IdentityKey, reader: Reader) -> StoreHit:
    """What is found; its bytes are right, or the pull of them fails."""
    store = KvStoreStub(process.info.address)
    hit = await store.lookup(identity, LAYOUT, KEYS, timeout_s=10.0)
    numbers = list(range(hit.num_blocks))
    for run in hit.runs:
        outcome = await asyncio.to_thread(reader.pull, run.producer, run.group, list(run.blocks), numbers)
        assert outcome.reason == ""
        assert [reader.bytes_of(run.group, n) for n in numbers] == [
            content(run.group, 50 + n) for n in numbers
        ]
    await store.release([hit.lease_id] if hit.lease_id else [])
    await store.close()
    return hit


def disk_hits(samples) -> float:
    return samples.value("triptych_kv_offload_tiering_chunk_hits_total", tier="disk")


def written(samples) -> bool:
    return samples.value("triptych_kv_offload_seconds_count", tier="disk", direction="store") == len(KEYS)


async def test_a_store_that_was_started_anew_serves_what_the_directory_holds(
    directory: Directory, identity: IdentityKey, worker: Peer, reader: Reader
) -> None:
    async with directory.store() as process:
        await use_twice(process, identity, worker)
        await process.until(written)
        process.process.kill()
        await process.died()
    worker.kill()
    async with directory.store("kv.num_blocks=3") as process:
        # Nobody offers anything: the directory says whose the blocks are. Memory has room for three.
        stranger = msgspec.structs.replace(identity, revision="other")
        store = KvStoreStub(process.info.address)
        assert (await store.lookup(stranger, LAYOUT, KEYS)).num_blocks == 0
        # Who could be served, but has nothing here, does not decide it.
        other = msgspec.structs.replace(identity, numerics="other")
        assert (await store.lookup(other, LAYOUT, [key(9, 0), key(9, 1)])).num_blocks == 0
        await store.close()
        assert (await look_up(process, identity, reader)).num_blocks == 3
        assert disk_hits(await process.metrics()) == 6
    async with directory.store() as process:
        assert (await look_up(process, identity, reader)).num_blocks == NUM_BLOCKS
        assert disk_hits(await process.metrics()) == len(KEYS)
        assert (await look_up(process, identity, reader)).num_blocks == NUM_BLOCKS
        assert disk_hits(await process.metrics()) == len(KEYS)
    assert len(record_files(directory.path)) == len(KEYS)


async def test_a_flipped_byte_on_disk_is_a_counted_miss(
    directory: Directory, identity: IdentityKey, worker: Peer, reader: Reader
) -> None:
    async with directory.store() as process:
        await use_twice(process, identity, worker)
        await process.until(written)
    damaged = record_files(directory.path)[3]
    with damaged.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        old = file.read(1)
        file.seek(-100, os.SEEK_END)
        file.write(bytes([old[0] ^ 4]))
    async with directory.store() as process:
        assert (await look_up(process, identity, reader)).num_blocks < NUM_BLOCKS
        samples = await process.metrics()
    assert samples.value("triptych_checksum_failures_total", kind="disk") == 1
    assert samples.total("triptych_kv_offload_promotion_failures_total") == 1
    assert [name.split("-")[1] for name in quarantined(directory.path)] == ["payload"]


@pytest.mark.parametrize("name", TIER_FAILPOINTS)
async def test_killed_at_any_point_of_a_write_it_leaves_nothing_half_done(
    name: str, directory: Directory, identity: IdentityKey, worker: Peer, reader: Reader
) -> None:
    async with directory.store(f"runtime.failpoints={name}=kill:3") as process:
        await use_twice(process, identity, worker)
        assert await process.died() == -signal.SIGKILL
    num_whole = len(record_files(directory.path))
    async with directory.store() as process:
        assert os.listdir(directory.path / "tmp") == []
        assert quarantined(directory.path) == []
        await look_up(process, identity, reader)
        # Every record that was whole is still there, and good.
        samples = await process.metrics()
        assert samples.total("triptych_kv_offload_promotion_failures_total") == 0
        await use_twice(process, identity, worker)
        await look_up(process, identity, reader)
    assert len(record_files(directory.path)) >= num_whole
    assert directory_bytes(directory.path) <= 1 << 20


async def test_a_full_disk_is_no_trouble(
    directory: Directory, identity: IdentityKey, worker: Peer, reader: Reader
) -> None:
    async with directory.store() as process:
        for folder in directory.path.glob("[0-9a-f][0-9a-f]"):
            folder.rmdir()
            folder.write_text("in the way")  # no record can be put there
        await use_twice(process, identity, worker)
        await process.until(lambda s: s.total("triptych_kv_offload_write_failures_total") > 0)
        assert (await look_up(process, identity, reader)).num_blocks == NUM_BLOCKS
