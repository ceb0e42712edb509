"""The arithmetic and the page of the bench; nothing is measured here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.client import median
from tests.bench.figures import Figure, figures_of, load, readme, record, save, table
from tests.bench.run import gateway_figures, model_figures, witness_figures

WHERE = {
    "date": "2030-01-01T00:00:00Z",
    "commit": "abc",
    "machine": {"cpu": "A", "cores": 2},
    "load_average": [0.5, 1.0, 1.5],
}


@pytest.mark.parametrize(
    ("value", "goal", "at_most", "met"),
    [(4.0, 5.0, True, True), (6.0, 5.0, True, False), (6.0, 5.0, False, True), (4.0, 5.0, False, False)],
)
def test_a_goal_has_a_side(value: float, goal: float, at_most: bool, met: bool) -> None:
    figure = Figure("f", value, "ms", goal, at_most)
    assert figure.met is met
    assert figure.ratio == value / goal


def test_without_a_goal_nothing_is_judged() -> None:
    figure = Figure("f", 1.0, "ms")
    assert figure.met is None and figure.ratio is None
    assert table([figure]).splitlines()[-1] == "| f | 1 ms |  |  |  |"


def test_a_table_says_goal_ratio_and_verdict() -> None:
    found = table(
        [
            Figure("TTFT", 412.3, "ms", 500.0, basis="1.0 x peer"),
            Figure("rate", 45.678, "tokens/s", 50.0, at_most=False),
        ]
    ).splitlines()
    assert found[-2] == "| TTFT | 412 ms | at most 500 ms (1.0 x peer) | 0.82 | met |"
    assert found[-1] == "| rate | 45.7 tokens/s | at least 50 tokens/s | 0.91 | **not met** |"


def test_results_are_kept_and_shown_again(tmp_path: Path) -> None:
    figures = [Figure("a", 12_345.0, "tokens/s", 5000.0, at_most=False), Figure("b", 2.0, "s")]
    save(record("part", WHERE, figures, {"samples": [1, 2]}), tmp_path)
    (tmp_path / "chaos.json").write_text(json.dumps({"bench": "chaos", "figures": {"requests": 1}}))
    (result,) = load(tmp_path)
    assert figures_of(result) == figures
    page = readme([result])
    assert "## part" in page and "commit abc" in page and "load average 0.5 1.0 1.5" in page
    assert "| a | 12,345 tokens/s | at least 5,000 tokens/s | 2.47 | met |" in page


def test_printed_results_become_figures() -> None:
    step = {"ours_ms": 10.0, "transformers_ms": 20.0, "ratio": 0.5}
    printed = {"prefill_256": step, "decode_batch_1": step, "decode_batch_8": step}
    assert [figure.ratio for figure in model_figures(printed)] == [0.5] * 3
    rates = {"decode_tokens_per_s": 120_000}
    found = witness_figures(
        {
            "batch": 32,
            "context": 512,
            "greedy": rates,
            "temperature_1": rates,
            "oracle_greedy_tokens_per_s": 9_000,
        }
    )
    assert found[0].met and found[1].goal is None
    keys = (
        "ttft_added_ms",
        "router_cpu_us_per_token_1_stream",
        "router_cpu_us_per_token_32_streams",
        "tokens_per_s_32_streams",
    )
    values, goals = dict.fromkeys(keys, 2.0), dict.fromkeys(keys, 4.0)
    found = gateway_figures({"figures": values, "goals": goals})
    assert [figure.met for figure in found] == [True, True, True, False]


def test_the_middle_value() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([]) != median([])
