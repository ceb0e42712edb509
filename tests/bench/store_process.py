"""Figures of the store as a process: its RPCs, and its start over a full directory."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shared.clock import SystemEntropy
from shared.config.services import TransferConfig
from shared.errors import TriptychError
from shared.kernels.checksum import head_checksums
from shared.kv_cache.block_hash import BlockHasher
from shared.registry.identity import identity_of
from shared.rpc.kv_store import KvStoreStub
from shared.tiering.disk_files import path_of
from shared.tiering.record import KvRecord, Record, encode_header
from shared.transfer.agent import TransferAgent
from shared.transfer.arena import Arena
from shared.transfer.factory import make_backends
from shared.types.identity import IdentityKey
from shared.types.store import BlockKey, OfferedBlock
from shared.types.transfer import BlockRef
from tests.bench.bench_disk import drop_cache
from tests.bench.figures import ROOT, Figure
from tests.bench.store_setting import PREFIX, SMALL, chain, tokens_of

WITNESS = ROOT / "models" / "witness"


@contextmanager
def store_process(port: int, *settings: str) -> Iterator[subprocess.Popen[bytes]]:
    settings = (f"model.path={WITNESS}", f"server.port={port}", "telemetry.log_level=warning", *settings)
    argv = [sys.executable, "-m", "services.kv_store", *(x for s in settings for x in ("--set", s))]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    process = subprocess.Popen(argv, cwd=ROOT, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def until_serving(stub: KvStoreStub, port: int) -> None:
    """Until the store answers. A channel that was refused tries again after 0.1, 0.26, 0.5, 0.9, 1.6, 2.6 s,
    which is a matter of the channel: so it is not used before somebody listens at the port."""
    while True:
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            break
        await asyncio.sleep(0.005)
    while True:
        try:
            await stub.status(timeout_s=0.2)
            return
        except TriptychError:
            await asyncio.sleep(0.005)


def small_side() -> tuple[Arena, TransferAgent, list[BlockRef]]:
    """A worker with a prefix of small committed blocks."""
    incarnation = SystemEntropy().hex_id()
    extent = SMALL.groups[0].extent_bytes(SMALL.block_size)
    arena = Arena.create("kv", (PREFIX,), (extent,), incarnation)
    backends = make_backends(TransferConfig(order=("shm",)), "worker")
    agent = TransferAgent("worker", incarnation, backends, {"kv": arena}, ["shm"])
    arena.generations(0)[:] = 1
    refs = [BlockRef(n, 1, head_checksums(arena.block(0, n), 1)) for n in range(PREFIX)]
    return arena, agent, refs


async def rpc_figures(num_calls: int = 400) -> list[Figure]:
    arena, agent, refs = small_side()
    identity = identity_of(WITNESS, WITNESS.name, "uint64", "exact")
    keys = chain(BlockHasher(identity, 16), tokens_of(random.Random(1), PREFIX))
    port = free_port()
    with store_process(port) as process:
        stub = KvStoreStub(f"127.0.0.1:{port}")
        await until_serving(stub, port)
        offered = [OfferedBlock(key, ref) for key, ref in zip(keys, refs, strict=True)]
        # The agent of nobody reads: it only has to be readable while the store pulls.
        if await stub.offer(identity, agent.info(SMALL), offered) != PREFIX:
            raise RuntimeError("the store did not keep what it was offered")
        taken: list[float] = []
        before = cpu_s(process.pid)
        for _ in range(num_calls):
            began = time.perf_counter()
            hit = await stub.lookup(identity, SMALL, keys)
            taken.append(time.perf_counter() - began)
            await stub.release([hit.lease_id])
        cpu = (cpu_s(process.pid) - before) / num_calls
        await stub.close()
    agent.close()
    arena.close()
    title = f"over RPC, {PREFIX}-block prefix, all found:"
    return [
        Figure(f"{title} look-up, median", statistics.median(taken) * 1e3, "ms"),
        Figure(f"{title} CPU of the store for look-up and release", cpu * 1e3, "ms"),
    ]


def write_directory(folder: Path, num_records: int, identity: IdentityKey) -> list[list[BlockKey]]:
    """A tier's directory with so many small records, and the prefixes they make."""
    rng, hasher = random.Random(2), BlockHasher(identity, 16)
    payload = bytes(SMALL.groups[0].extent_bytes(SMALL.block_size))
    sums = head_checksums(memoryview(payload), 1)
    chains = [chain(hasher, tokens_of(rng, PREFIX)) for _ in range(-(-num_records // PREFIX))]
    folder.mkdir(mode=0o700)
    (folder / "lock").touch(0o600)
    for key in [key for keys in chains for key in keys][:num_records]:
        made = Record(identity, SMALL, KvRecord.of(key), sums, len(payload))
        path = folder / path_of(made.key)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.write_bytes(encode_header(made) + payload)
    return chains


async def restart_figures(num_records: int) -> list[Figure]:
    identity = identity_of(WITNESS, WITNESS.name, "uint64", "exact")
    figures = []
    with tempfile.TemporaryDirectory(dir=ROOT / ".triptych") as made:
        folder = Path(made) / "disk"
        chains = write_directory(folder, num_records, identity)
        os.sync()
        for state in ("page cache dropped", "warm"):
            if state != "warm":
                drop_cache(folder)
            port = free_port()
            began = time.perf_counter()
            with store_process(port, f"disk.path={folder}", "disk.capacity_mb=1024"):
                stub = KvStoreStub(f"127.0.0.1:{port}")
                await until_serving(stub, port)
                serving_s = time.perf_counter() - began
                hit = await stub.lookup(identity, SMALL, chains[0], timeout_s=5.0)
                hit_s = time.perf_counter() - began
                await stub.close()
                if hit.num_blocks != PREFIX:
                    raise RuntimeError(f"only {hit.num_blocks} blocks were found after the start")
            title = f"start over {num_records} records on disk, {state}:"
            figures.append(Figure(f"{title} process started to serving", serving_s, "s", 2.0))
            figures.append(Figure(f"{title} process started to first hit of 64 blocks", hit_s, "s", 2.0))
    return figures
