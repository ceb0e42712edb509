"""The store as a process of its own: a worker's blocks outlive the worker."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from shared.registry.identity import identity_of
from shared.rpc.control import ControlServicer
from shared.rpc.kv_store import KvStoreStub
from shared.rpc.server import RpcServer
from shared.types.identity import LayoutSpec
from shared.types.kv import KVGroupSpec
from shared.types.store import BlockKey, OfferedBlock
from shared.types.worker import WorkerInfo, WorkerStatus
from tests.contract.transfer.harness import Peer, Reader
from tests.contract.transfer.peer import EXTENT_BYTES, HEADS, content

#: Groups whose blocks are as large as the peer's.
LAYOUT = LayoutSpec((KVGroupSpec(1, HEADS, 8, "uint64"), KVGroupSpec(3, HEADS, 8, "uint64")), 16)
EPOCH = 5


class Router:
    """A router that only hears announcements."""

    def __init__(self) -> None:
        self.known: asyncio.Queue[WorkerInfo] = asyncio.Queue()

    async def announce(self, info: WorkerInfo) -> tuple[int, float]:
        if info.agent.epoch == EPOCH:
            self.known.put_nowait(info)
        return EPOCH, 0.05

    async def withdraw(self, worker_id: str, incarnation: str) -> None: ...

    def workers(self) -> Sequence[tuple[WorkerInfo, WorkerStatus | None]]:
        return ()


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
async def announced(model_dir: Path, repo_root: Path) -> AsyncIterator[WorkerInfo]:
    """A running store process, as it announced itself with its epoch."""
    assert [g.extent_bytes(LAYOUT.block_size) for g in LAYOUT.groups] == list(EXTENT_BYTES)
    router, server = Router(), RpcServer()
    ControlServicer(router).add_to(server.server)
    port = await server.start()
    settings = [f"model.path={model_dir}", "model.name=m", f"routers=127.0.0.1:{port}", "kv.memory_mb=1"]
    argv = [sys.executable, "-m", "services.kv_store", *(x for s in settings for x in ("--set", s))]
    environment = {**os.environ, "PYTHONPATH": f"{repo_root}:{repo_root / 'proto'}"}
    process = subprocess.Popen(argv, cwd=repo_root, env=environment, stderr=subprocess.DEVNULL)
    try:
        yield await asyncio.wait_for(router.known.get(), 60)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 30) == 0
    finally:
        process.kill()
        process.wait()
        await server.stop()


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


def key(n: int, group: int) -> BlockKey:
    return BlockKey(group, bytes([n + 1]) * 32, bytes([n]) * 32, tuple(range(16)))


async def test_blocks_outlive_their_worker(
    announced: WorkerInfo, model_dir: Path, worker: Peer, reader: Reader
) -> None:
    identity = identity_of(model_dir, "m", "uint64", "exact")
    producer = msgspec.structs.replace(worker.info, layout=LAYOUT)
    blocks = [OfferedBlock(key(n, g), worker.commit(g, n, 50 + n)) for g in (0, 1) for n in range(3)]
    store = KvStoreStub(announced.address)
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


def test_a_configuration_that_cannot_work_ends_with_status_2(repo_root: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{repo_root}:{repo_root / 'proto'}"}
    argv = [sys.executable, "-m", "services.kv_store", "--set", f"model.path={tmp_path / 'none'}"]
    done = subprocess.run(argv, cwd=repo_root, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "config.json" in done.stderr
