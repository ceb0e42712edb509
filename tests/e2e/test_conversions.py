"""Real processes of different ranks and block sizes: the handoff between them changes no answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.e2e.fields import COMPLETIONS, TEXT, chat, expected, picture, routed, sampled
from tests.e2e.serving import PATIENCE_S, POLL_S, WITNESS, Serving, serving
from tests.e2e.test_fields import answer_of, check

pytestmark = pytest.mark.e2e

#: Of a block of 16 tokens of the witness.
EXTENT_BYTES = 512
CASES = [
    sampled("prompt of one token", prompt=[65]),
    sampled("prompt of one block of the larger", prompt=[66] * 32),
    sampled("prompt of many blocks", prompt=TEXT * 12),
    routed("three choices", {"n": 3}, n=3),
    chat("picture", [TEXT, picture(64, 32, "red"), "What is this?"]),
]


@pytest.fixture(scope="module")
def converting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Two ranks and small blocks at prefill and in the store, one rank and larger blocks at decode."""
    overrides = ["prefill:runtime.tp_size=2", "decode:kv.block_size=32"]
    # A prefill worker that starts anew finds nothing but what the store has.
    overrides.append("prefill:kv.keeper=")
    with serving(WITNESS, tmp_path_factory.mktemp("convert"), "e=1,p=1,d=1,s=1", overrides) as deployment:
        yield deployment


async def test_answers_across_ranks_and_block_sizes_are_the_oracles(converting: Serving) -> None:
    answers = await asyncio.gather(*(answer_of(converting, case) for case in CASES))
    for case, answer in zip(CASES, answers, strict=True):
        prompt = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
        for choice, want in zip(answer["choices"], expected(case, prompt), strict=True):
            check(choice, want)
    # Again, from the prefixes that each worker keeps, in blocks of its own.
    assert await asyncio.gather(*(answer_of(converting, case) for case in CASES)) == answers


async def test_it_was_the_handoff_that_brought_the_prompt(converting: Serving) -> None:
    """Fresh prompts of several lengths: decode pulls every token of each, and computes none."""
    lengths = {f"{length:032x}": length for length in (100, 128, 333)}
    async with converting.client() as http:
        for trace_id, length in lengths.items():
            body = {"model": converting.model, "prompt": [length % 256, *[7] * (length - 1)], "max_tokens": 9}
            headers = {"traceparent": f"00-{trace_id}-{'1' * 16}-01"}
            assert (await http.post(COMPLETIONS, json=body, headers=headers)).status_code == 200
    wanted = {(trace_id, "kv.transfer") for trace_id in lengths}
    converting.wait_for_spans(lambda spans: wanted <= {(span.trace_id, span.name) for span in spans})
    for trace_id, length in lengths.items():
        (span,) = [span for span in converting.trace(trace_id) if span.name == "kv.transfer"]
        assert span.number("kv.blocks_held") == 0
        # Whole blocks of the prefill worker's size.
        assert span.number("kv.bytes") == -(-length // 16) * EXTENT_BYTES


async def test_a_new_worker_of_two_ranks_takes_its_prefix_from_the_store(converting: Serving) -> None:
    kept = "triptych_kv_store_accepted_total"
    case, before = sampled("kept", prompt=[9] * 320), converting.metrics("kv-store-0").value(kept)
    answer = await answer_of(converting, case)
    async with asyncio.timeout(PATIENCE_S):
        while converting.metrics("kv-store-0").value(kept) < before + 320 // 16:
            await asyncio.sleep(POLL_S)
    killed = converting.kill("prefill-0")
    await converting.until_back("prefill-0", killed)
    assert await answer_of(converting, case) == answer
    check(answer["choices"][0], expected(case, [9] * 320)[0])
    # All blocks but the one with the last token, which is always computed.
    read = converting.metrics("prefill-0").value("triptych_transfer_bytes_total", backend="shm", kind="store")
    assert read == (320 // 16 - 1) * EXTENT_BYTES


async def test_nothing_is_left_behind(converting: Serving) -> None:
    assert await converting.at_rest() == {}
