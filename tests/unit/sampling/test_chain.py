"""The reference chain: order of the stages, ties, truncation, penalties, log-probabilities, errors."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from shared.errors import NumericalError
from shared.sampling.chain import sample
from shared.sampling.row import Sampled
from shared.types.request import SamplingParams

EOS = (3,)


def pick(
    logits: list[float],
    *,
    history: tuple[int, ...] = (0,),
    prompt: int = 1,
    masked_from: int | None = None,
    choice: int = 0,
    **fields: Any,
) -> Sampled:
    params = SamplingParams(max_tokens=16, **fields)
    return sample(
        np.array(logits, dtype=np.float32),
        params,
        choice=choice,
        history=history,
        num_prompt_tokens=prompt,
        eos_token_ids=EOS,
        masked_from=masked_from,
    )


def support(logits: list[float], draws: int = 200, **fields: Any) -> set[int]:
    """The ids that come up over many seeds."""
    return {pick(logits, seed=seed, **fields).token_id for seed in range(draws)}


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    assert pick([1, 5, 5, 2], temperature=0.0).token_id == 1


def test_draws_follow_the_softmax() -> None:
    logits = [math.log(0.5), math.log(0.3), math.log(0.2)]
    counts = Counter(pick(logits, seed=seed).token_id for seed in range(4000))
    assert [counts[i] / 4000 for i in range(3)] == pytest.approx([0.5, 0.3, 0.2], abs=0.03)


def test_temperature_sharpens_before_truncation() -> None:
    # At T = 1 min_p 0.5 keeps both (ratio e^-0.5 = 0.61); at T = 0.5 the ratio is e^-1 = 0.37.
    assert support([1.0, 0.5], min_p=0.5) == {0, 1}
    assert support([1.0, 0.5], min_p=0.5, temperature=0.5) == {0}


def test_top_k_keeps_exactly_k_and_prefers_lower_ids_on_ties() -> None:
    assert support([1, 2, 2, 2], top_k=2) == {1, 2}


def test_top_k_larger_than_the_vocabulary_cuts_nothing() -> None:
    assert support([1, 1, 1], top_k=100) == {0, 1, 2}


def test_top_p_keeps_the_smallest_prefix_that_reaches_its_mass() -> None:
    assert support([0, 0, 0, 0], top_p=0.5) == {0, 1}
    assert support([0, 0, 0, 0], top_p=0.51) == {0, 1, 2}
    assert support([0, 0, 0, 0], top_p=0.0) == {0}


def test_top_p_counts_mass_of_what_top_k_left() -> None:
    # Of four equal ids two are left by top_k; one of them holds half of their mass.
    assert support([0, 0, 0, 0], top_k=2, top_p=0.5) == {0}


def test_min_p_is_relative_to_the_likeliest() -> None:
    logits = [math.log(0.6), math.log(0.3), math.log(0.1)]
    assert support(logits, min_p=0.4) == {0, 1}


def test_a_vanishing_temperature_is_greedy() -> None:
    assert support([1.0, 1.0001, 0.0], temperature=1e-300, draws=20) == {1}


def test_the_draw_depends_on_seed_choice_and_position_only() -> None:
    logits = [0.0] * 50
    first = pick(logits, seed=5, history=(1, 2, 3))
    assert first == pick(logits, seed=5, history=(9, 8, 7))
    changed = [
        pick(logits, seed=6, history=(1, 2, 3)),
        pick(logits, seed=5, history=(1, 2, 3, 4)),
        pick(logits, seed=5, history=(1, 2, 3), choice=1),
    ]
    assert all(other != first for other in changed)


def test_logit_bias_moves_greedy_too() -> None:
    assert pick([1, 2, 3, 0], temperature=0.0, logit_bias=((0, 5.0), (99, 50.0))).token_id == 0


def test_min_tokens_masks_the_end_and_stop_ids_until_enough_were_emitted() -> None:
    logits = [1.0, 0.0, 8.0, 9.0]
    common: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (2,)}
    assert pick(logits, history=(0, 0), prompt=1, **common).token_id == 0
    assert pick(logits, history=(0, 0, 0), prompt=1, **common).token_id == 3


def test_min_tokens_wins_over_logit_bias() -> None:
    assert pick([1, 0, 0, 0], temperature=0.0, min_tokens=1, logit_bias=((3, 100.0),)).token_id == 0


def test_repetition_penalty_covers_prompt_and_output() -> None:
    # Positive logits are divided, negative ones multiplied.
    assert pick([3, 2, 0, 0], history=(0,), temperature=0.0, repetition_penalty=2.0).token_id == 1
    assert pick([-1, -1.5, -9, -9], history=(0,), temperature=0.0, repetition_penalty=2.0).token_id == 1
    assert pick([3, 2, 0, 0], history=(1, 0), prompt=1, temperature=0.0, repetition_penalty=4.0).token_id == 0


def test_frequency_and_presence_cover_the_output_only() -> None:
    logits = [3.0, 2.0, 0.0, 0.0]
    assert pick(logits, history=(0, 0, 0), prompt=3, temperature=0.0, frequency_penalty=1.0).token_id == 0
    assert pick(logits, history=(0, 0, 0), prompt=1, temperature=0.0, frequency_penalty=0.6).token_id == 1
    assert pick(logits, history=(0, 0, 0), prompt=1, temperature=0.0, presence_penalty=0.6).token_id == 0
    assert pick(logits, history=(0, 0), prompt=1, temperature=0.0, presence_penalty=1.5).token_id == 1


def test_repetition_comes_before_presence() -> None:
    # 4 / 2 - 1.5 = 0.5 < 1; the other order would give (4 - 1.5) / 2 = 1.25 > 1.
    result = pick(
        [4, 1, -9, -9], history=(2, 0), temperature=0.0, repetition_penalty=2.0, presence_penalty=1.5
    )
    assert result.token_id == 1


def test_history_outside_the_vocabulary_is_passed_over() -> None:
    result = pick(
        [3, 2, 0],
        history=(7, 0, 7),
        prompt=1,
        temperature=0.0,
        repetition_penalty=2.0,
        frequency_penalty=1.0,
        masked_from=3,
    )
    assert result.token_id == 1


def test_masked_ids_are_neither_sampled_nor_reported() -> None:
    result = pick([1, 2, 9, 9], temperature=0.0, masked_from=2, logprobs=4)
    assert result.token_id == 1
    assert result.logprobs is not None
    assert result.logprobs.top_ids == (1, 0)
    assert sum(math.exp(p) for p in result.logprobs.top_logprobs) == pytest.approx(1.0)


def test_logprobs_are_the_models_own_before_bias_and_temperature() -> None:
    logits = [math.log(0.5), math.log(0.25), math.log(0.25)]
    result = pick(logits, temperature=0.0, logit_bias=((2, 10.0),), logprobs=2)
    assert result.token_id == 2
    assert result.logprobs is not None
    assert result.logprobs.logprob == pytest.approx(math.log(0.25))
    assert result.logprobs.rank == 2  # behind id 1, whose logit is the same
    assert result.logprobs.top_ids == (0, 1)
    assert result.logprobs.top_logprobs == pytest.approx([math.log(0.5), math.log(0.25)])


def test_impossible_tokens_are_not_listed() -> None:
    result = pick([1.0, -math.inf, 0.0], temperature=0.0, logprobs=3)
    assert result.logprobs is not None
    assert result.logprobs.top_ids == (0, 2)


def test_logprobs_zero_reports_the_chosen_token_alone() -> None:
    result = pick([1.0, 0.0], temperature=0.0, logprobs=0)
    assert result.logprobs is not None
    assert result.logprobs.top_ids == () and result.logprobs.rank == 0
    assert pick([1.0, 0.0], temperature=0.0).logprobs is None


@pytest.mark.parametrize("logits", [[1.0, math.nan], [math.inf, 0.0], [-math.inf, -math.inf]])
def test_rows_without_finite_logits_are_refused(logits: list[float]) -> None:
    with pytest.raises(NumericalError):
        pick(logits)


def test_non_finite_values_among_masked_ids_do_no_harm() -> None:
    assert pick([1.0, 0.0, math.nan], temperature=0.0, masked_from=2).token_id == 0


def test_a_minimum_length_that_forbids_everything_is_refused() -> None:
    with pytest.raises(NumericalError):
        pick([-math.inf] * 3 + [1.0], min_tokens=5)


def test_the_callers_logits_are_left_alone() -> None:
    logits = np.array([1.0, 2.0, 3.0])
    params = SamplingParams(max_tokens=1, top_k=1, logit_bias=((0, 9.0),), repetition_penalty=2.0)
    sample(logits, params, choice=0, history=[1], num_prompt_tokens=1, eos_token_ids=())
    assert logits.tolist() == [1.0, 2.0, 3.0]
