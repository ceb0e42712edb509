"""What the kv_store keeps on disk outlives it, in real processes: the same answers, and counted hits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.cli.metrics_view import Samples
from shared.types.request import SamplingParams
from tests.e2e.fields import CHAT, COMPLETIONS, MAX_MODEL_LEN, ORACLE, Case, chat, expected, picture
from tests.e2e.serving import PATIENCE_S, POLL_S, WITNESS, Serving, serving

pytestmark = pytest.mark.e2e

PROMPT = tuple((11 * i + 5) % 256 for i in range(150))
#: Whole blocks of the prompt that a look-up asks for, and that an offer brings.
NUM_BLOCKS = 9
DISK_HITS = "triptych_kv_offload_tiering_chunk_hits_total"
STORED = "triptych_kv_offload_seconds_count"


async def until(served: Serving, name: str, enough: Callable[[Samples], bool]) -> Samples:
    """A process's metrics, once they are ``enough``. Raises TimeoutError."""
    async with asyncio.timeout(PATIENCE_S):
        while not enough(samples := await asyncio.to_thread(served.metrics, name)):
            await asyncio.sleep(POLL_S)
    return samples


async def restart(served: Serving, *names: str) -> None:
    """SIGKILL; the launcher starts them again."""
    killed = {name: served.kill(name) for name in names}
    for name, pid in killed.items():
        await served.until_back(name, pid)


async def complete(served: Serving, seed: int) -> None:
    """One completion, which must be the oracle's."""
    sampling = SamplingParams(max_tokens=20, temperature=1.0, seed=seed)
    body = {"model": served.model, "prompt": list(PROMPT), "return_token_ids": True}
    body |= {"max_tokens": 20, "temperature": 1.0, "seed": seed}
    async with served.client() as client:
        reply = await client.post(COMPLETIONS, json=body)
    assert reply.status_code == 200, reply.text
    answer = ORACLE.generate(PROMPT, sampling, max_model_len=MAX_MODEL_LEN)
    assert reply.json()["choices"][0]["token_ids"] == list(answer.token_ids)


async def look_at(served: Serving, case: Case) -> None:
    """One question about a picture, whose answer must be the oracle's."""
    body: dict[str, Any] = {"model": served.model, "return_token_ids": True, **case.body}
    async with served.client() as client:
        reply = await client.post(CHAT, json=body)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    (want,) = expected(case, answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"])
    assert tuple(answer["choices"][0]["token_ids"]) == want.token_ids


async def test_a_prompt_is_found_on_disk_after_the_store_was_killed(tmp_path: Path) -> None:
    overrides = (
        f"kv_store:disk.path={tmp_path / 'disk'}",
        "kv_store:disk.capacity_mb=64",
        "prefill:kv.prefix_caching=false",  # what a worker holds itself it does not ask for
    )
    with serving(WITNESS, tmp_path / "state", "e=0,p=1,d=1,s=1", overrides) as served:
        await complete(served, 1)
        await until(served, "kv-store-0", lambda s: s.total("triptych_kv_store_accepted_total") >= NUM_BLOCKS)
        await complete(served, 2)
        await until(
            served, "kv-store-0", lambda s: s.value(STORED, tier="disk", direction="store") >= NUM_BLOCKS
        )
        # A prefill worker that has measured nothing yet tries the store.
        await restart(served, "kv-store-0", "prefill-0")
        await complete(served, 3)
        samples = served.metrics("kv-store-0")
        assert samples.value(DISK_HITS, tier="disk") == NUM_BLOCKS
        assert samples.total("triptych_kv_offload_promotion_failures_total") == 0
        assert served.metrics("prefill-0").total("triptych_kv_store_hits_total") == NUM_BLOCKS
        assert await served.at_rest() == {}


async def test_a_picture_is_not_encoded_again_though_encoder_and_store_were_killed(tmp_path: Path) -> None:
    overrides = (f"kv_store:disk.path={tmp_path / 'disk'}", "kv_store:disk.capacity_mb=64")
    case = chat("picture", [picture(100, 130, "teal"), "What is it?"])
    workers = ("encoder-0", "prefill-0")  # prefill holds embeddings, too
    with serving(WITNESS, tmp_path / "state", "e=1,p=1,d=1,s=1", overrides) as served:
        await look_at(served, case)
        assert served.metrics("encoder-0").total("triptych_encoded_items_total") == 1
        await until(served, "kv-store-0", lambda s: s.total("triptych_transfer_bytes_total") > 0)
        await restart(served, *workers)
        await look_at(served, case)
        encoder = served.metrics("encoder-0")
        assert encoder.total("triptych_encoded_items_total") == 0 == encoder.total("triptych_steps_total")
        assert encoder.total("triptych_embedding_store_hits_total") == 1
        stored = {"tier": "disk", "direction": "store"}
        await until(served, "kv-store-0", lambda s: s.value(STORED, **stored) > 0)
        await restart(served, "kv-store-0", *workers)
        await look_at(served, case)
        encoder = served.metrics("encoder-0")
        assert encoder.total("triptych_encoded_items_total") == 0
        assert served.metrics("kv-store-0").value(DISK_HITS, tier="disk") >= 1
        # Without the store it is encoded: trouble is a miss.
        served.kill("kv-store-0")
        other = chat("another", [picture(64, 32, "olive"), "What is it?"])
        await look_at(served, other)
        assert served.metrics("encoder-0").total("triptych_encoded_items_total") == 1


async def test_an_encoder_without_stores_of_its_own_finds_them_by_way_of_its_router(tmp_path: Path) -> None:
    queries = "triptych_embedding_store_queries_total"
    with serving(WITNESS, tmp_path / "state", "e=1,p=1,d=1,s=1", ("encoder:kv_stores=",)) as served:
        async with asyncio.timeout(PATIENCE_S):
            for n in range(1000):
                await look_at(served, chat(f"picture {n}", [picture(40 + n, 30, "teal"), "What is it?"]))
                if served.metrics("encoder-0").total(queries):
                    break
                await asyncio.sleep(POLL_S)
