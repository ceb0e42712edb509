"""The batched twin and the candidate twin return what the reference chain returns, case by case."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from shared.errors import NumericalError
from shared.sampling import chain
from shared.sampling.candidates import sample_candidates
from shared.sampling.device import sample_batch
from shared.sampling.row import Sampled, SamplerRow
from shared.types.request import SamplingParams, TokenLogprobs

EOS = (1, 2)


def random_params(rnd: random.Random, vocab: int) -> SamplingParams:
    num_biased = rnd.choice([0, 0, 3])
    return SamplingParams(
        max_tokens=16,
        temperature=rnd.choice([0.0, 0.3, 1.0, 1.0, 2.0, 1e-300]),
        top_k=rnd.choice([0, 0, 1, 3, 50, 10_000]),
        top_p=rnd.choice([1.0, 1.0, 0.9, 0.5, 0.0]),
        min_p=rnd.choice([0.0, 0.0, 0.05, 0.5, 1.0]),
        seed=rnd.getrandbits(63),
        repetition_penalty=rnd.choice([1.0, 1.0, 1.3, 0.7]),
        presence_penalty=rnd.choice([0.0, 0.0, 0.5, -1.0]),
        frequency_penalty=rnd.choice([0.0, 0.0, 0.3]),
        logit_bias=tuple(
            (i, rnd.choice([-100.0, 5.0, 0.25])) for i in rnd.sample(range(vocab + 5), num_biased)
        ),
        stop_token_ids=(3,),
        min_tokens=rnd.choice([0, 0, 5]),
        logprobs=rnd.choice([None, None, 0, 1, 20]),
    )


def random_logits(rnd: random.Random, rows: int, vocab: int) -> np.ndarray:
    generator = np.random.default_rng(rnd.getrandbits(32))
    if rnd.random() < 0.5:  # many ties
        logits = generator.integers(-2, 3, (rows, vocab)).astype(np.float32)
    else:
        logits = (generator.standard_normal((rows, vocab)) * 3).astype(np.float32)
    if rnd.random() < 0.2:
        logits[generator.random((rows, vocab)) < 0.3] = -np.inf
    if rnd.random() < 0.05:
        logits[rnd.randrange(rows), rnd.randrange(vocab)] = rnd.choice([np.nan, np.inf])
    if rnd.random() < 0.05:
        logits[rnd.randrange(rows)] = -np.inf
    return logits


def random_row(rnd: random.Random, vocab: int) -> SamplerRow:
    num_prompt = rnd.randrange(1, 8)
    history = [rnd.randrange(vocab + 4) for _ in range(num_prompt + rnd.randrange(9))]
    return SamplerRow(random_params(rnd, vocab), rnd.randrange(3), history, num_prompt, EOS)


def context(row: SamplerRow) -> dict[str, Any]:
    return {
        "params": row.params,
        "choice": row.choice,
        "history": row.history,
        "num_prompt_tokens": row.num_prompt_tokens,
        "eos_token_ids": row.eos_token_ids,
    }


def reference(logits_V: np.ndarray, row: SamplerRow, masked_from: int | None) -> Sampled | None:
    try:
        return chain.sample(logits_V, **context(row), masked_from=masked_from)
    except NumericalError:
        return None


def assert_same_logprobs(ours: TokenLogprobs | None, expected: TokenLogprobs | None) -> None:
    if expected is None or ours is None:
        assert ours is expected
        return
    assert (ours.rank, ours.top_ids) == (expected.rank, expected.top_ids)
    assert ours.logprob == pytest.approx(expected.logprob, abs=1e-5)
    assert ours.top_logprobs == pytest.approx(expected.top_logprobs, abs=1e-5)


@pytest.mark.parametrize("seed", range(8))
def test_the_batched_twin_equals_the_reference(seed: int) -> None:
    rnd = random.Random(seed)
    failures = 0
    for _ in range(150):
        vocab, num_rows = rnd.choice([12, 40, 300, 3000]), rnd.choice([1, 3, 4])
        masked_from = rnd.choice([None, vocab - 3])
        logits = random_logits(rnd, num_rows, vocab)
        rows = [random_row(rnd, vocab) for _ in range(num_rows)]
        before = logits.copy()
        got = sample_batch(torch.from_numpy(logits), rows, masked_from=masked_from)
        np.testing.assert_array_equal(logits, before)
        for r, row in enumerate(rows):
            expected = reference(logits[r], row, masked_from)
            if expected is None:
                failures += 1
                assert r in got.failed and got.token_ids[r] == -1 and got.logprobs[r] is None
                continue
            assert r not in got.failed
            assert got.token_ids[r] == expected.token_id
            assert_same_logprobs(got.logprobs[r], expected.logprobs)
    assert failures > 0


@pytest.mark.parametrize("seed", range(4))
def test_the_candidate_twin_equals_the_reference(seed: int) -> None:
    rnd = random.Random(seed)
    for _ in range(300):
        vocab = rnd.choice([12, 40])
        logits_V = random_logits(rnd, 1, vocab)[0]
        row = random_row(rnd, vocab)
        ids = [i for i in range(vocab) if np.isfinite(logits_V[i])]
        masked_V = np.full(vocab, -np.inf)
        masked_V[ids] = logits_V[ids]
        expected = reference(masked_V, row, None)
        if not ids:
            continue
        values = [float(logits_V[i]) for i in ids]
        if expected is None:
            with pytest.raises(NumericalError):
                sample_candidates(ids, values, **context(row))
            continue
        got = sample_candidates(ids, values, **context(row))
        assert got.token_id == expected.token_id
        assert_same_logprobs(got.logprobs, expected.logprobs)


def test_top_p_beyond_the_first_look_sorts_everything() -> None:
    # A flat distribution over 5,000 ids: half of its mass lies beyond the largest thousand.
    logits = np.random.default_rng(1).standard_normal((1, 5000)).astype(np.float32) * 0.01
    for seed in range(20):
        params = SamplingParams(max_tokens=1, top_p=0.5, min_p=0.5, seed=seed)
        row = SamplerRow(params, 0, [1], 1, EOS)
        expected = chain.sample(logits[0], **context(row))
        assert sample_batch(torch.from_numpy(logits), [row]).token_ids == [expected.token_id]


def test_half_precision_logits_are_taken_as_they_are() -> None:
    logits = torch.tensor([[1.0, 4.0, 4.0, 2.0]], dtype=torch.bfloat16)
    row = SamplerRow(SamplingParams(max_tokens=1, temperature=0.0, logprobs=1), 0, [0], 1, ())
    got = sample_batch(logits, [row])
    assert got.token_ids == [1] and got.failed == ()
    assert sample_batch(torch.full((1, 4), torch.nan, dtype=torch.bfloat16), [row]).failed == (0,)


def test_neighbours_in_a_batch_do_not_matter() -> None:
    rnd = random.Random(3)
    logits = torch.from_numpy(random_logits(rnd, 6, 300)).nan_to_num(0.0)
    rows = [random_row(rnd, 300) for _ in range(6)]
    together = sample_batch(logits, rows)
    alone = [sample_batch(logits[r : r + 1], [rows[r]]).token_ids[0] for r in range(6)]
    assert together.token_ids == alone
