"""The store as a process of its own, with what a test asks of it; and the layout of the peers it serves."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from services.cli.metrics_view import Samples
from shared.rpc.control import ControlServicer
from shared.rpc.server import RpcServer
from shared.types.identity import LayoutSpec
from shared.types.kv import KVGroupSpec
from shared.types.store import BlockKey
from shared.types.worker import WorkerInfo, WorkerStatus
from tests.contract.transfer.peer import EXTENT_BYTES, HEADS

ROOT = Path(__file__).resolve().parents[3]
#: Groups whose blocks are as large as the peer's.
LAYOUT = LayoutSpec((KVGroupSpec(1, HEADS, 8, "uint64"), KVGroupSpec(3, HEADS, 8, "uint64")), 16)
assert tuple(g.extent_bytes(LAYOUT.block_size) for g in LAYOUT.groups) == EXTENT_BYTES
EPOCH = 5
PATIENCE_S = 60.0
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}


def key(n: int, group: int) -> BlockKey:
    return BlockKey(group, bytes([n + 1]) * 32, bytes([n]) * 32, tuple(range(16)))


class _Router:
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


class StoreProcess:
    """``async with`` a running store, announced with its epoch. Ends by SIGTERM, unless it ended before."""

    def __init__(self, model_dir: Path, metrics_port: int, *settings: str) -> None:
        self._settings = [
            f"model.path={model_dir}",
            "model.name=m",
            "kv.memory_mb=1",
            f"server.metrics_port={metrics_port}",
            *settings,
        ]
        self._metrics = f"http://127.0.0.1:{metrics_port}/metrics"
        self._router, self._server = _Router(), RpcServer()

    async def __aenter__(self) -> StoreProcess:
        ControlServicer(self._router).add_to(self._server.server)
        settings = [*self._settings, f"routers=127.0.0.1:{await self._server.start()}"]
        argv = [sys.executable, "-m", "services.kv_store", *(x for s in settings for x in ("--set", s))]
        self.process = subprocess.Popen(argv, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
        self.info = await asyncio.wait_for(self._router.known.get(), PATIENCE_S)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(self.process.wait, 30) == 0
        finally:
            self.process.kill()
            self.process.wait()
            await self._server.stop()

    async def died(self) -> int:
        """Its exit status, once it has ended."""
        return await asyncio.to_thread(self.process.wait, PATIENCE_S)

    async def metrics(self) -> Samples:
        async with httpx.AsyncClient(trust_env=False) as client:
            return Samples((await client.get(self._metrics)).text)

    async def until(self, enough: Callable[[Samples], bool]) -> Samples:
        """Its metrics, as soon as they are ``enough``. Raises TimeoutError."""
        async with asyncio.timeout(PATIENCE_S):
            while not enough(samples := await self.metrics()):
                await asyncio.sleep(0.02)
        return samples
