"""What the contract suite needs to know of each registry: how to open one and how to let time pass."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from shared.clock import ManualClock
from shared.registry.base import Registry
from shared.registry.memory import MemoryRegistry
from shared.registry.redis import RedisRegistry


class Harness(Protocol):
    def open(self) -> Registry:
        """A view of one and the same registry: a second router's, when called again."""
        ...

    async def expire(self) -> None:
        """Let every entry's time run out."""
        ...


class MemoryHarness:
    """The one process shares the one object."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.registry = MemoryRegistry(self.clock, ttl_s=5.0)

    def open(self) -> Registry:
        return self.registry

    async def expire(self) -> None:
        self.clock.advance(5.0)


class RedisHarness:
    """A real server; its clock is its own, so entries here live shortly and are waited for."""

    def __init__(self, url: str, ttl_s: float = 30.0) -> None:
        self.url = url
        self.ttl_s = ttl_s

    def open(self, timeout_s: float = 30.0) -> RedisRegistry:
        """With a deadline that a busy machine keeps; the shipped one is for the tests of it."""
        return RedisRegistry(self.url, self.ttl_s, prefix="test", timeout_s=timeout_s)

    async def expire(self) -> None:
        """Redis counts whole milliseconds: make every entry's time one of them, and see it gone."""
        registry = self.open()
        async for key in registry._redis.scan_iter("test:worker:*"):
            assert 0 < await registry._redis.pttl(key) <= self.ttl_s * 1000
            await registry._redis.pexpire(key, 1)
            while await registry._redis.exists(key):
                await asyncio.sleep(0.001)
        await registry.close()


class RedisServer:
    """A redis-server process of the test's own, reached by a socket in a private folder."""

    def __init__(self, folder: Path) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            raise FileNotFoundError("redis-server is not on PATH")
        self.url = f"unix://{folder}/redis.sock"
        argv = [
            binary,
            "--port",
            "0",
            "--unixsocket",
            f"{folder}/redis.sock",
            "--save",
            "",
            "--dir",
            str(folder),
        ]
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(argv, stdout=self._log, stderr=subprocess.STDOUT)
        self._folder = folder
        self._await_ready()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _await_ready(self) -> None:
        """Its log says when it listens; a server that ends before that is an error."""
        while b"ready to accept connections" not in (self._folder / "log").read_bytes().lower():
            try:
                self._process.wait(0.01)
            except subprocess.TimeoutExpired:
                continue
            raise RuntimeError(f"redis-server ended: {(self._folder / 'log').read_text()}")


@contextmanager
def redis_server() -> Iterator[RedisServer]:
    # A short path: socket addresses hold about 100 characters.
    with tempfile.TemporaryDirectory(prefix="redis") as folder:
        server = RedisServer(Path(folder))
        try:
            yield server
        finally:
            server.stop()
