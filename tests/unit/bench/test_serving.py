"""How the peer's variants are compared; nothing is measured here."""

from __future__ import annotations

from tests.bench.bench_serving import Samples, figures
from tests.bench.peer import Variant

FAST, CLOSE, SLOW = Variant(2, "sdpa"), Variant(1, "sdpa"), Variant(1, "eager")


def samples() -> Samples:
    found = Samples()
    for name in ("ttft_s", "itl_median_s", "itl_mean_s"):
        found.ours[name] = [0.5, 9.0, 0.4]
        found.theirs[name] = {FAST: [1.0, 1.1, 7.0], CLOSE: [1.2], SLOW: [2.0]}
    found.ours["tokens_per_s"] = [60.0]
    found.theirs["tokens_per_s"] = {FAST: [30.0], CLOSE: [40.0], SLOW: [20.0]}
    return found


def test_a_variant_far_from_the_best_in_everything_is_out() -> None:
    found = samples()
    assert found.contenders() == sorted([FAST, CLOSE])
    found.theirs["tokens_per_s"][SLOW] = [39.0]
    assert SLOW in found.contenders()


def test_figures_stand_beside_the_best_variant_of_each() -> None:
    ttft, *_, rate = figures(samples())
    assert (ttft.value, ttft.goal) == (500.0, 1100.0)
    assert rate.goal is not None and abs(rate.goal - 44.0) < 1e-9
    assert ttft.met and rate.met
