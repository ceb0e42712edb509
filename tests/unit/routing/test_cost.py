"""Learning what a way costs, and following a placement until it is rolling."""

from __future__ import annotations

import random

import pytest

from shared.clock import ManualClock
from shared.routing.cost import FORGET_S, CostModel, Line
from shared.routing.policy import Placement
from shared.routing.trial import MeasuredCosts, Trial
from shared.telemetry import metrics
from shared.types.worker import AGGREGATED, PREFILL


def learned(samples: list[tuple[float, float]]) -> Line:
    line = Line()
    for now, (amount, seconds) in enumerate(samples):
        line.add(amount, seconds, float(now))
    return line


def test_nothing_measured_is_nothing_known() -> None:
    assert Line().predict(5, 0.0) is None and Line().slope(0.0) == 0.0


def test_a_line_with_a_fixed_part_is_found() -> None:
    line = learned([(x, 0.5 + 0.01 * x) for x in (10, 200, 35, 90, 400, 10, 77)])
    assert line.predict(1000, 7.0) == pytest.approx(10.5, rel=1e-6)
    assert line.slope(7.0) == pytest.approx(0.01, rel=1e-6)


def test_equal_amounts_mean_proportion() -> None:
    assert learned([(100, 2.0)] * 5).predict(50, 5.0) == pytest.approx(1.0)
    flat = Line(proportional=False)
    flat.add(100, 2.0, 0.0)
    assert flat.predict(1000, 0.0) == pytest.approx(2.0), "or not, where there is mostly a fixed part"


@pytest.mark.parametrize("falling", [[(10, 5.0), (20, 4.0), (40, 1.0)], [(1, 0.0), (9, 3.0), (30, 11.0)]])
def test_no_line_ever_predicts_less_for_more_or_below_nothing(falling: list[tuple[float, float]]) -> None:
    line = learned(falling)
    values = [line.predict(x, 3.0) for x in (0, 1, 10, 100)]
    assert all(v is not None and v >= 0 for v in values) and values == sorted(values)  # type: ignore[type-var]


def test_a_hiccup_is_no_trend_but_a_change_is_learned() -> None:
    line = learned([(100, 1.0)] * 20)
    line.add(100, 60.0, 20.0)
    after = line.predict(100, 20.0)
    assert after is not None and after < 1.4
    for now in range(21, 41):
        line.add(100, 10.0, float(now))
    assert line.predict(100, 41.0) == pytest.approx(10.0, rel=0.1)


def test_what_was_not_measured_for_long_is_forgotten() -> None:
    line = learned([(100, 1.0)])
    assert line.predict(100, FORGET_S) is not None
    assert line.predict(100, FORGET_S + 1) is None
    line.add(100, 9.0, FORGET_S + 2)
    assert line.predict(100, FORGET_S + 2) == pytest.approx(9.0), "the old samples do not count any more"


def test_a_worker_that_never_served_alone_is_believed_to_compute_like_the_others() -> None:
    costs = CostModel()
    assert costs.alone("d0", 100, 0, 0.0) is None
    costs.prefilled("p0", 100, 1.0, 0.0)
    costs.prefilled("p1", 100, 3.0, 0.0)
    assert costs.alone("d0", 100, 0, 0.0) == pytest.approx((2.0, 0.0))
    assert costs.alone("d0", 100, 4, 0.0) == pytest.approx((2.0, 4 * 2.0)), "its streams are held up"
    costs.served_alone("d0", 100, 0.5, 0.0)
    assert costs.alone("d0", 200, 1, 0.0) == pytest.approx((1.0, 1.0))


def test_apart_is_prefill_and_handoff() -> None:
    costs = CostModel()
    costs.prefilled("p0", 100, 1.0, 0.0)
    assert costs.apart("p0", "d0", 100, 50, 0.0) is None
    costs.handed_off("d0", 50, 0.2, 0.0)
    assert costs.apart("p0", "d0", 200, 100, 0.0) == pytest.approx(2.2)


def test_gone_workers_leave_nothing_behind() -> None:
    costs = CostModel()
    for index in range(100):
        costs.prefilled(f"p{index}", 100, 1.0, index * 10.0)
    assert len(costs._prefill) <= FORGET_S / 10 + 2


class Watch:
    """One trial after the other on a manual clock."""

    def __init__(self) -> None:
        self.clock = ManualClock(50.0)
        self.costs = MeasuredCosts(self.clock)

    def apart(self, prefill_s: float, handoff_s: float, moved: int = 64) -> None:
        trial = Trial(self.costs, Placement(PREFILL, "d0", "p0", (), 128.0, 100.0, None))
        trial.begin()
        trial.moves(moved)
        self.clock.advance(prefill_s)
        trial.prefilled()
        self.clock.advance(handoff_s)
        for index in range(1, 4):
            trial.decoded(index)
            self.clock.advance(0.5)


def test_a_trial_apart_measures_prefill_and_handoff() -> None:
    watch = Watch()
    watch.apart(1.0, 0.25)
    now = watch.clock.now()
    assert watch.costs.model._prefill["p0"].predict(128, now) == pytest.approx(1.0)
    assert watch.costs.model._handoff["d0"].predict(64, now) == pytest.approx(0.25)


def test_a_trial_alone_ends_with_the_token_after_the_first() -> None:
    watch = Watch()
    trial = Trial(watch.costs, Placement(AGGREGATED, "d0", "", (), 128.0, 0.0, 1.0))
    trial.decoded(7)  # not begun: media are encoded still
    trial.begin()
    watch.clock.advance(2.0)
    trial.decoded(0)
    trial.decoded(0)  # another choice's first
    watch.clock.advance(0.5)
    trial.decoded(1)
    watch.clock.advance(9.0)
    trial.decoded(2)
    assert watch.costs.model._alone["d0"].predict(128, watch.clock.now()) == pytest.approx(2.5)


def test_predicted_and_actual_are_counted() -> None:
    def total(kind: str) -> float:
        return metrics.DECISION_COST.labels("alone", kind)._sum.get()

    watch, before = Watch(), (total("predicted"), total("actual"))
    trial = Trial(watch.costs, Placement(AGGREGATED, "d0", "", (), 128.0, 0.0, 3.0))
    trial.begin()
    watch.clock.advance(4.0)
    trial.decoded(0)
    trial.decoded(1)
    assert (total("predicted") - before[0], total("actual") - before[1]) == (3.0, 4.0)


def test_the_choice_flips_when_the_link_gets_slow_and_comes_back_later() -> None:
    """Link and workers by arithmetic, with noise; decode has two streams that would be held up."""
    from shared.routing.policy import Demand, place
    from tests.unit.routing.test_policy import view

    rng = random.Random(5)
    watch = Watch()
    views = [view("p0"), view("d0", num_requests=2)]
    errors: list[float] = []

    def serve(seconds_per_moved_token: float) -> str:
        tokens = rng.randrange(100, 1000)
        placement = place(views, Demand("m", tokens), watch.costs)
        assert placement is not None
        trial = Trial(watch.costs, placement)
        trial.begin()
        compute = 0.02 + 0.003 * tokens * rng.uniform(0.8, 1.25)
        if placement.prefill:
            watch.clock.advance(compute)
            trial.prefilled()
            watch.clock.advance(0.01 + seconds_per_moved_token * tokens * rng.uniform(0.8, 1.25))
            trial.decoded(1)
        else:
            watch.clock.advance(compute)
            trial.decoded(0)
            trial.decoded(1)
        if placement.predicted_s is not None and placement.prefill:
            errors.append(abs(placement.predicted_s / (watch.clock.now() - trial._began) - 1))  # type: ignore[operator]
        return placement.mode

    assert [serve(0.001) for _ in range(30)] == [PREFILL] * 30
    throttled = [serve(0.010) for _ in range(20)]
    assert AGGREGATED in throttled
    assert serve(0.010) == AGGREGATED
    healed = [serve(0.001) for _ in range(60)]
    assert PREFILL in healed and healed[-1] == PREFILL, "a way not taken is tried again"
    errors.sort()
    assert errors[len(errors) // 2] < 0.3
