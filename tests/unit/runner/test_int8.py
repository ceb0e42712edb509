"""Int8 weights in a whole model: near the full precision, and the same bits alone and in any company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.kernels import library
from shared.models import weights
from shared.models.registry import load_config
from shared.types.request import SamplingParams
from tests.unit.runner.driving import Driver

pytestmark = pytest.mark.skipif(not library.available(), reason="no C compiler")
TOP = SamplingParams(max_tokens=64, temperature=0.0, logprobs=5)


def driver(model: Path, cache: Path, *, int8: bool) -> Driver:
    return Driver(load_config(model), weights.prepare(model, cache, int8=int8), max_rows=4, max_len=128)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1000, 40000, (n,), generator=generator).tolist() for n in (20, 33, 64, 90)]


def test_log_probabilities_drift_little(text_model: Path, weights_cache: Path) -> None:
    exact, int8 = (driver(text_model, weights_cache, int8=kind) for kind in (False, True))
    drift = []
    for prompt in prompts():
        (wanted,), (got,) = (d.prefill(0, prompt, sampling=TOP).logprobs for d in (exact, int8))
        assert wanted is not None and got is not None
        known = dict(zip(got.top_ids, got.top_logprobs, strict=True))
        shared = [
            (known[i], p) for i, p in zip(wanted.top_ids, wanted.top_logprobs, strict=True) if i in known
        ]
        assert len(shared) >= 3
        drift += [abs(a - b) for a, b in shared]
    exact.close()
    int8.close()
    assert sum(drift) / len(drift) < 0.1


def test_a_row_is_the_same_alone_in_a_batch_and_in_pieces(text_model: Path, weights_cache: Path) -> None:
    world = driver(text_model, weights_cache, int8=True)
    alone = [world.prefill(row, prompt, sampling=TOP) for row, prompt in enumerate(prompts())]
    for row, prompt in enumerate(prompts()):
        assert world.prefill(row, prompt, sampling=TOP, chunk=7).logprobs == alone[row].logprobs
    together = world.decode({row: len(prompt) for row, prompt in enumerate(prompts())})
    for row, prompt in enumerate(prompts()):
        world.prefill(row, prompt, sampling=TOP)
        assert world.decode({row: len(prompt)}).logprobs[0] == together.logprobs[row]
    world.close()
