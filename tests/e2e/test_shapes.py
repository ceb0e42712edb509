"""The demo's six processes answer the golden pictures exactly as the reference did, token for token."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.cli.openai_client import user_message
from tests.e2e.serving import ROOT, Serving

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FOLDER = ROOT / "tests" / "golden" / "shapes"
CASES = json.loads((FOLDER / "cases.json").read_text(encoding="utf-8"))
#: 64 rows of 576 float32 features a picture.
EMBEDDING_BYTES = 64 * 576 * 4
AT_A_TIME = 6


def trace_id(label: str) -> str:
    return hashlib.sha256(label.encode()).hexdigest()[:32]


async def ask(http: httpx.AsyncClient, model: str, case: dict[str, Any], trace: str) -> dict[str, Any]:
    body = {
        "model": model,
        "messages": [user_message(case["question"], (FOLDER / case["image"]).read_bytes())],
        "temperature": 0,
        "max_completion_tokens": 32,
        "return_token_ids": True,
    }
    headers = {"traceparent": f"00-{trace}-{'1' * 16}-01"}
    response = await http.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_all_golden_pictures_through_all_phases(demo: Serving) -> None:
    slots = asyncio.Semaphore(AT_A_TIME)
    async with demo.client() as http:

        async def one(case: dict[str, Any]) -> dict[str, Any]:
            async with slots:
                return await ask(http, demo.model, case, trace_id(case["image"]))

        answers = await asyncio.gather(*map(one, CASES))
    for case, answer in zip(CASES, answers, strict=True):
        choice = answer["choices"][0]
        assert choice["token_ids"] == case["reference_token_ids"], case["image"]
        assert choice["message"]["content"] == case["reference_text"]
        assert choice["finish_reason"] == "stop"
        assert answer["usage"]["prompt_tokens"] == case["prompt_tokens"]
        assert answer["usage"]["completion_tokens"] == len(case["reference_token_ids"])
    check_traces(demo)
    assert await demo.at_rest() == {}


def check_traces(demo: Serving) -> None:
    """Every picture was encoded in one process, its rows were read by another, and its KV by a third."""
    wanted = {
        (trace_id(case["image"]), name)
        for case in CASES
        for name in ("encode", "embedding.transfer", "prefill", "kv.transfer", "decode")
    }
    demo.wait_for_spans(lambda spans: wanted <= {(span.trace_id, span.name) for span in spans})
    for case in CASES:
        trace = {span.name: span for span in demo.trace(trace_id(case["image"]))}
        assert trace["embedding.transfer"].number("embedding.bytes") == EMBEDDING_BYTES, case["image"]
        assert trace["kv.transfer"].number("kv.bytes") > 0
        assert len({trace[name].pid for name in ("encode", "prefill", "decode")}) == 3


async def test_a_picture_seen_before_is_not_encoded_again(demo: Serving) -> None:
    case = CASES[0]
    async with demo.client() as http:
        await ask(http, demo.model, case, trace_id("first"))
        before = demo.metrics("encoder-0").value("triptych_encoded_items_total")
        answer = await ask(http, demo.model, case, trace_id("second"))
    assert answer["choices"][0]["token_ids"] == case["reference_token_ids"]
    assert demo.metrics("encoder-0").value("triptych_encoded_items_total") == before > 0


def test_the_golden_pictures_are_all_different() -> None:
    digests = {hashlib.sha256(Path(FOLDER / case["image"]).read_bytes()).digest() for case in CASES}
    assert len(digests) == len(CASES) == 24
