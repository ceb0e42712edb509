"""Redis holds rebuildable hints only: with it down, or back with nothing in it, serving goes on."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from services.cli import procfs
from services.cli.deployment import Deployment, deployed
from services.cli.state import StateDir
from services.cli.topology import HOST, LaunchOptions, PublicPorts, Topology
from shared.clock import SystemEntropy
from shared.config.services import ModelConfig
from shared.registry.redis import RedisRegistry
from shared.runner.witness_config import load_witness_config
from shared.runner.witness_oracle import WitnessOracle
from shared.types.request import SamplingParams
from shared.types.worker import WorkerInfo
from tests.contract.registry.harness import RedisServer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not on PATH"),
]

WITNESS = Path(__file__).parents[2] / "models" / "witness"
ORACLE = WitnessOracle(load_witness_config(WITNESS))
PROMPT = [(7 * i + 3) % 256 for i in range(90)]


class Redis:
    """One address, behind which a server can be replaced by an empty one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = RedisServer(folder)
        self.url = self._server.url

    def stop(self) -> None:
        self._server.stop()

    def start_empty(self) -> None:
        (self._folder / "log").unlink()
        self._server = RedisServer(self._folder)


@pytest.fixture
def redis() -> Iterator[Redis]:
    with tempfile.TemporaryDirectory(prefix="redis") as folder:
        server = Redis(Path(folder))
        yield server
        server.stop()


@pytest.fixture
def serving(redis: Redis, tmp_path: Path) -> Iterator[Deployment]:
    ports = procfs.internal_ports(HOST, SystemEntropy())
    options = LaunchOptions(
        ModelConfig(str(WITNESS)),
        PublicPorts(next(ports), next(ports), next(ports)),
        overrides=("router:registry.kind=redis", f"router:registry.redis_url={redis.url}"),
    )
    with deployed(StateDir(tmp_path), Topology.parse("e=1,p=1,d=1,s=1"), options) as deployment:
        yield deployment


def ask(deployment: Deployment, seed: int) -> None:
    """One answer, which must be the oracle's."""
    body = {
        "model": "witness",
        "prompt": PROMPT,
        "max_tokens": 40,
        "temperature": 1.0,
        "seed": seed,
        "return_token_ids": True,
    }
    reply = httpx.post(f"{deployment.http_url}/v1/completions", json=body, timeout=30)
    assert reply.status_code == 200, reply.text
    wanted = ORACLE.generate(PROMPT, SamplingParams(max_tokens=40, seed=seed), max_model_len=2048)
    assert reply.json()["choices"][0]["token_ids"] == list(wanted.token_ids)


async def listed(redis: Redis) -> list[WorkerInfo]:
    """What another router would find."""
    registry = RedisRegistry(redis.url, 5.0, prefix="triptych", timeout_s=10.0)
    try:
        return await registry.workers()
    finally:
        await registry.close()


async def until_listed(redis: Redis, enough: Callable[[list[WorkerInfo]], bool]) -> None:
    """Wait for the announcements of a heartbeat or two."""
    for _ in range(200):
        if enough(await listed(redis)):
            return
        await asyncio.sleep(0.1)
    raise AssertionError("the workers never appeared in Redis")


def all_four(workers: list[WorkerInfo]) -> bool:
    return {worker.kind for worker in workers} == {"encoder", "prefill", "decode", "kv_store"}


async def test_serving_goes_on_without_redis_and_an_empty_one_is_filled_again(
    serving: Deployment, redis: Redis
) -> None:
    ask(serving, 1)
    await until_listed(redis, all_four)
    before = serving.pids()
    redis.stop()
    for seed in range(2, 6):
        ask(serving, seed)
    redis.start_empty()
    ask(serving, 6)
    await until_listed(redis, all_four)
    assert serving.pids() == before, "a process was restarted over a hint store"
