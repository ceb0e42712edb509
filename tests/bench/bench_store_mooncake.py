"""The KV store beside Mooncake's distributed store: the same blocks put and got, in turns, on one host.

python -m tests.bench.bench_store_mooncake [--rounds 15]

Ours by its real path, between processes: offer, pull, verify, commit by the store; look-up, pull, verify,
commit by a reader. Theirs from registered memory to registered memory in one call each, with its connection
pool, the holder of the objects a process of its own as ours is; it verifies nothing. Shown besides: its plain
``put`` and ``get`` of one object each, and objects held in the client's own process, which then copies
memory and asks nobody but the master.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import mmap
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shared.kv_cache.block_hash import BlockHasher
from shared.registry.identity import identity_of
from shared.rpc.kv_store import KvStoreStub
from shared.types.store import BlockKey, OfferedBlock
from tests.bench.figures import Figure, table
from tests.bench.setting import end_on_sigterm
from tests.bench.store_process import WITNESS, free_port, store_process, until_serving
from tests.bench.store_setting import MEDIUM, PREFIX, Side, chain, commit, tokens_of
from tests.unit.tiering.mooncake_setting import Cluster

_EXTENT = MEDIUM.groups[0].extent_bytes(MEDIUM.block_size)
_GOAL = 5.0
_WARM_UP = 4
#: What the store's memory holds, so that all of it was used before the first round that counts.
_STORE_BLOCKS = (_WARM_UP - 1) * PREFIX

#: By name: seconds of each round.
Taken = defaultdict[str, list[float]]


class Ours:
    """A worker and a reader in this process, the store in another."""

    def __init__(self, name: Literal["shm", "tcp"], stub: KvStoreStub) -> None:
        self.name = name
        self._stub = stub
        self._worker, self._reader = (
            Side(f"{name}-{who}", PREFIX, MEDIUM, name) for who in ("worker", "reader")
        )
        self._refs = [self._worker.fill(n) for n in range(PREFIX)]
        self._identity = identity_of(WITNESS, WITNESS.name, "uint64", "exact")
        self._hasher, self._rng = BlockHasher(self._identity, 16), random.Random(name)
        self._keys: list[BlockKey] = []

    async def put(self) -> None:
        offered = [OfferedBlock(key, ref) for key, ref in zip(self._keys, self._refs, strict=True)]
        if await self._stub.offer(self._identity, self._worker.info(), offered) != PREFIX:
            raise RuntimeError("the store did not keep what it was offered")

    async def get(self) -> str:
        hit = await self._stub.lookup(self._identity, MEDIUM, self._keys)
        if hit.num_blocks != PREFIX:
            raise RuntimeError(f"only {hit.num_blocks} blocks were found")
        self._reader.pull(hit.runs[0], range(PREFIX))
        commit(self._keys, hit.runs[0].blocks)
        return hit.lease_id

    async def round(self, taken: Taken) -> None:
        self._keys = chain(self._hasher, tokens_of(self._rng, PREFIX))
        self._reader.arena.block(0, PREFIX - 1)[:] = bytes(_EXTENT)
        await _timed(taken[f"{self.name} put"], self.put)
        lease_id = await _timed(taken[f"{self.name} get"], self.get)
        await self._stub.release([lease_id])
        for block in (0, PREFIX - 1):
            if self._reader.arena.block(0, block) != self._worker.arena.block(0, block):
                raise RuntimeError("other bytes came back")

    def close(self) -> None:
        self._worker.close()
        self._reader.close()


class Theirs:
    """Mooncake's client in this process, with ``segment_bytes`` of its own for objects. ``plain`` rounds are
    measured, too."""

    def __init__(self, name: str, master: str, segment_bytes: int, *, plain: bool = False) -> None:
        self.name = name
        self._plain = plain
        self._store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        if self._store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 16 << 20, "tcp", "", master):
            raise RuntimeError("mooncake cannot be set up")
        self._memory = np.frombuffer(mmap.mmap(-1, 2 * PREFIX * _EXTENT), np.uint8)
        self._blocks = self._memory.reshape(2, PREFIX, _EXTENT)
        self._blocks[0] = np.random.default_rng(0).integers(256, size=(PREFIX, 1), dtype=np.uint8)
        self._store.register_buffer(self._memory.ctypes.data, self._memory.nbytes)
        base = int(self._memory.ctypes.data)
        self._from, self._into = ([base + (PREFIX * n + i) * _EXTENT for i in range(PREFIX)] for n in (0, 1))
        self._sizes = [_EXTENT] * PREFIX
        self._names: list[str] = []
        self._num_rounds = 0

    async def put(self) -> None:
        if set(self._store.batch_put_from(self._names, self._from, self._sizes)) != {0}:
            raise RuntimeError("mooncake did not keep what it was given")

    async def get(self) -> None:
        if set(self._store.batch_get_into(self._names, self._into, self._sizes)) != {_EXTENT}:
            raise RuntimeError("mooncake did not find what it was given")

    async def round(self, taken: Taken) -> None:
        self._num_rounds += 1
        self._names = [f"{self.name}/{self._num_rounds}/{n}" for n in range(PREFIX)]
        self._blocks[1] = 0
        await _timed(taken[f"{self.name} put"], self.put)
        await _timed(taken[f"{self.name} get"], self.get)
        if not np.array_equal(*self._blocks):
            raise RuntimeError("other bytes came back")
        self._store.batch_remove(self._names, True)
        if self._plain:
            await _timed(taken[f"{self.name} put, plain"], self.put_plain)
            await _timed(taken[f"{self.name} get, plain"], self.get_plain)
            self._store.batch_remove(self._names, True)

    async def put_plain(self) -> None:
        for name, block in zip(self._names, self._blocks[0], strict=True):
            if self._store.put(name, block):
                raise RuntimeError("mooncake did not keep what it was given")

    async def get_plain(self) -> None:
        for name in self._names:
            if len(self._store.get(name)) != _EXTENT:
                raise RuntimeError("mooncake did not find what it was given")

    def close(self) -> None:
        self._store.close()


async def _timed(taken: list[float], call: Callable[[], Awaitable[Any]]) -> Any:
    began = time.perf_counter()
    result = await call()
    taken.append(time.perf_counter() - began)
    return result


async def _measure(rounds: int, ours: dict[Literal["shm", "tcp"], int], master: str, taken: Taken) -> None:
    stubs = {name: KvStoreStub(f"127.0.0.1:{port}") for name, port in ours.items()}
    for name, stub in stubs.items():
        await until_serving(stub, ours[name])
    sides: list[Ours | Theirs] = [Ours(name, stub) for name, stub in stubs.items()]
    sides.append(Theirs("mooncake", master, 0, plain=True))
    for turn in range(-_WARM_UP, rounds):
        for n in range(len(sides)):
            await sides[(n + turn) % len(sides)].round(taken if turn >= 0 else defaultdict(list))
    for side in sides:
        side.close()
    for stub in stubs.values():
        await stub.close()


async def _measure_inside(rounds: int, master: str, taken: Taken) -> None:
    inside = Theirs("mooncake in process", master, 4 * PREFIX * _EXTENT)
    for turn in range(-_WARM_UP, rounds):
        await inside.round(taken if turn >= 0 else defaultdict(list))
    inside.close()


@contextmanager
def _mooncake(holder: bool) -> Iterator[str]:
    """The address of a running master; with ``holder`` a process beside it keeps the objects."""
    # Read when the library is loaded.
    os.environ |= {"MC_TCP_ENABLE_CONNECTION_POOL": "1", "GLOG_minloglevel": "3", "MC_LOG_LEVEL": "ERROR"}
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder))
        try:
            cluster.start_master()
            if holder:
                cluster.start_holder("256MB")
            yield cluster.master
        finally:
            cluster.close()


def mooncake_figures(rounds: int) -> tuple[list[Figure], dict[str, Any]]:
    """Nothing where Mooncake is not installed."""
    if importlib.util.find_spec("mooncake") is None:
        return [], {"mooncake": "not installed"}
    taken: Taken = defaultdict(list)
    ports: dict[Literal["shm", "tcp"], int] = {"shm": free_port(), "tcp": free_port()}
    memory = f"kv.num_blocks={_STORE_BLOCKS}"
    with (
        store_process(ports["shm"], memory),
        store_process(ports["tcp"], memory),
        _mooncake(holder=True) as master,
    ):
        asyncio.run(_measure(rounds, ports, master, taken))
    with _mooncake(holder=False) as master:
        asyncio.run(_measure_inside(rounds, master, taken))
    medians = {name: statistics.median(values) for name, values in taken.items()}
    title = f"{PREFIX} blocks of {_EXTENT / 1e3:.0f} kB"
    figures: list[Figure] = []
    for call in ("put", "get"):
        theirs = medians[f"mooncake {call}"]
        basis = f"Mooncake, tcp = 1: {PREFIX * _EXTENT / theirs / 1e9:.1f} GB/s"
        figures.append(
            Figure(f"{title}: {call}, shm", theirs / medians[f"shm {call}"], "x", _GOAL, False, basis)
        )
        for other, ours, name in (
            (call, "tcp", f"{call}, tcp"),
            (f"{call}, plain", "shm", f"{call}, shm, beside Mooncake's of one object each"),
        ):
            ratio = medians[f"mooncake {other}"] / medians[f"{ours} {call}"]
            figures.append(Figure(f"{title}: {name}", ratio, "x"))
        ratio = medians[f"mooncake in process {call}"] / medians[f"shm {call}"]
        figures.append(Figure(f"{title}: {call}, shm, beside Mooncake's within its process", ratio, "x"))
    return figures, {f"{title}, ms": {name: round(value * 1e3, 2) for name, value in medians.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description="The KV store beside Mooncake.")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    end_on_sigterm()
    figures, details = mooncake_figures(args.rounds)
    print(table(figures))
    print(details)


if __name__ == "__main__":
    main()
