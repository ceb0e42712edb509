"""The oracle's finish rule, and that the definition it implements does not drift."""

import pytest

from shared.runner.witness_config import WitnessConfig
from shared.runner.witness_oracle import MediaSpan, WitnessOracle
from shared.types.request import SamplingParams

CONFIG = WitnessConfig()
ORACLE = WitnessOracle(CONFIG)
PROMPT = [72, 101, 108, 108, 111]
FREE = SamplingParams(max_tokens=600, temperature=0.0, ignore_eos=True)


def test_the_definition_is_pinned() -> None:
    media = [MediaSpan(1, 3, b"picture")]
    assert ORACLE.state(PROMPT) == 0xAF3965A7691DCC98
    assert ORACLE.state(PROMPT, media) == 0x0D599268A1A54CA4


def test_max_tokens_ends_with_length() -> None:
    answer = ORACLE.generate(PROMPT, SamplingParams(max_tokens=7, temperature=0.0, ignore_eos=True))
    assert len(answer.token_ids) == 7 and answer.finish_reason == "length"


def test_the_context_ends_with_length() -> None:
    unlimited = SamplingParams(max_tokens=0, temperature=0.0, ignore_eos=True)
    answer = ORACLE.generate(PROMPT, unlimited, max_model_len=20)
    assert len(answer.token_ids) == 15 and answer.finish_reason == "length"


def test_the_end_of_sequence_is_emitted_and_stops_unless_ignored() -> None:
    long = ORACLE.generate(PROMPT, FREE).token_ids
    at = long.index(CONFIG.eos_token_id)
    answer = ORACLE.generate(PROMPT, SamplingParams(max_tokens=600, temperature=0.0))
    assert answer[:2] == (long[: at + 1], "stop")
    assert len(long) == 600


def test_a_stop_id_is_emitted_and_stops() -> None:
    long = ORACLE.generate(PROMPT, FREE).token_ids
    stop = long[5]
    params = SamplingParams(max_tokens=600, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,))
    assert ORACLE.generate(PROMPT, params)[:2] == (long[: long.index(stop) + 1], "stop")


def test_nothing_ends_the_answer_before_min_tokens() -> None:
    for seed in range(20):
        params = SamplingParams(max_tokens=600, seed=seed, min_tokens=80)
        assert len(ORACLE.generate(PROMPT, params).token_ids) >= 80


def test_choices_and_seeds_differ_and_repeat() -> None:
    params = SamplingParams(max_tokens=30, seed=1)
    answers = [ORACLE.generate(PROMPT, params, choice).token_ids for choice in (0, 1, 0)]
    assert answers[0] != answers[1] and answers[0] == answers[2]


@pytest.mark.parametrize("changed", [(0, 3, b"picture"), (1, 3, b"Picture")])
def test_place_and_bytes_of_media_count(changed: tuple[int, int, bytes]) -> None:
    assert ORACLE.state(PROMPT, [changed]) != ORACLE.state(PROMPT, [(1, 3, b"picture")])


def test_answers_vary_in_length() -> None:
    params = [SamplingParams(max_tokens=200, seed=seed) for seed in range(40)]
    lengths = {len(ORACLE.generate(PROMPT, p).token_ids) for p in params}
    assert len(lengths) > 15
