"""Several real kv_stores as one pool: a prefix comes from all of them, and one that dies takes along only
what it held alone."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from services.cli import procfs
from services.cli.deployment import deployed
from services.cli.state import StateDir
from services.cli.topology import HOST, LaunchOptions, PublicPorts, Topology
from shared.clock import SystemEntropy
from shared.config.services import ModelConfig
from shared.types.request import SamplingParams
from tests.e2e.fields import MAX_MODEL_LEN, ORACLE
from tests.e2e.serving import POLL_S, WITNESS, Serving

pytestmark = pytest.mark.e2e

BLOCK_SIZE, NUM_BLOCKS = 8, 200
#: One worker that keeps no prefix itself: what is found, was found in the stores.
#: Its steps are small, so that computing a prompt is never measured to be cheaper than loading it.
OVERRIDES = (
    f"kv.block_size={BLOCK_SIZE}",
    "kv_store:kv.num_blocks=4096",
    "decode:kv.prefix_caching=false",
    "decode:scheduler.max_num_batched_tokens=4",
)
HITS = "triptych_kv_store_hits_total"
#: After a restart the first hit has to come so soon.
BACK_S = 5.0


class Pool(Serving):
    """A deployment of one worker and several stores."""

    def stores(self) -> list[str]:
        """The names of those that are alive."""
        return [spec.name for spec in self.specs if spec.kind == "kv_store" and self.pid(spec.name)]

    def hits(self) -> dict[str, int]:
        """Blocks found so far by each store that is alive, and altogether by the worker."""
        return {name: int(self.metrics(name).value(HITS)) for name in (*self.stores(), "decode-0")}

    async def gained(self, seed: int) -> dict[str, int]:
        """Blocks found by each for this prompt, which is asked once, and answered as it has to be."""
        before = self.hits()
        await self.ask(seed)
        return {name: count - before.get(name, 0) for name, count in self.hits().items()}

    async def ask(self, seed: int, max_tokens: int = 16, strike: str = "") -> None:
        """One answer, which must be the oracle's. ``strike`` is killed after its first tokens."""
        body = {
            "model": self.model,
            "prompt": prompt_of(seed),
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "seed": seed,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        token_ids: list[int] = []
        async with self.client() as http, http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == httpx.codes.OK, await response.aread()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                token_ids += [i for choice in event["choices"] for i in choice.get("token_ids") or ()]
                if strike and token_ids:
                    self.kill(strike)
                    strike = ""
        sampling = SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True)
        wanted = ORACLE.generate(prompt_of(seed), sampling, 0, [], max_model_len=MAX_MODEL_LEN)
        assert token_ids == list(wanted.token_ids) and not strike

    async def fill(self, seed: int) -> dict[str, int]:
        """Ask this prompt until the whole of it is found; returns who found how much."""
        for _ in range(20):
            gained = await self.gained(seed)
            if gained["decode-0"] == NUM_BLOCKS:
                return gained
            await asyncio.sleep(POLL_S)
        raise AssertionError(f"the prompt is never found as a whole: {gained}")

    async def until_dead(self, name: str) -> None:
        """Until the supervisor has seen its end."""
        async with asyncio.timeout(10.0):
            while self.pid(name):
                await asyncio.sleep(POLL_S)


def prompt_of(seed: int) -> list[int]:
    return [(seed + 7 * i * i + i // 3) % 256 for i in range(NUM_BLOCKS * BLOCK_SIZE + 1)]


@contextmanager
def pool_of(
    folder: Path, num_stores: int, overrides: Sequence[str] = (), *, restart: bool = False
) -> Iterator[Pool]:
    ports = procfs.internal_ports(HOST, SystemEntropy())
    options = LaunchOptions(
        ModelConfig(str(WITNESS)),
        PublicPorts(next(ports), next(ports), next(ports)),
        overrides=(*OVERRIDES, *overrides),
    )
    topology = Topology.parse(f"e=0,p=0,d=1,s={num_stores}")
    with deployed(StateDir(folder), topology, options, restart=restart) as deployment:
        yield Pool(deployment, None)


async def spread(pool: Pool) -> tuple[int, dict[str, int]]:
    """A prompt of which every store has a part, and who found how much of it."""
    for seed in range(40):
        found = await pool.fill(seed)
        if all(found[name] for name in pool.stores()):
            return seed, found
    raise AssertionError("no prompt was spread over all stores")


async def test_a_prefix_comes_from_both_stores_and_then_from_the_one_that_is_left(tmp_path: Path) -> None:
    with pool_of(tmp_path, 2) as pool:
        seed, found = await spread(pool)
        assert found["kv-store-0"] + found["kv-store-1"] == NUM_BLOCKS
        await pool.ask(seed, 300, strike="kv-store-1")
        await pool.until_dead("kv-store-1")
        # Its segments belong to the other one from now on.
        found = await pool.fill(seed)
        assert found["kv-store-0"] == NUM_BLOCKS
        assert pool.metrics("decode-0").total("triptych_kv_store_node_pauses_total") >= 1


async def test_with_two_copies_nothing_is_lost_with_a_store(tmp_path: Path) -> None:
    # The worker has no store in its configuration: its router lists them.
    with pool_of(tmp_path, 3, ["store_replicas=2", "decode:kv_stores="]) as pool:
        seed, found = await spread(pool)
        assert sum(found[name] for name in pool.stores()) >= NUM_BLOCKS
        assert await pool.at_rest() == {}, "offers are over: both copies have arrived"
        await pool.ask(seed, 300, strike="kv-store-1")
        await pool.until_dead("kv-store-1")
        found = await pool.gained(seed)
        assert found["decode-0"] == NUM_BLOCKS, "every segment has a copy that is alive"


async def test_a_store_that_comes_back_is_used_again_soon(tmp_path: Path) -> None:
    with pool_of(tmp_path, 2, restart=True) as pool:
        seed, _ = await spread(pool)
        killed = pool.kill("kv-store-1")
        await pool.until_back("kv-store-1", killed)
        back_at = time.monotonic()
        while not (await pool.gained(seed)).get("kv-store-1"):
            assert time.monotonic() - back_at < BACK_S
            await asyncio.sleep(POLL_S)
