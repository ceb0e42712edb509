"""The chaos judge itself: a good ledger passes, and each forged bad one fails by the rule it breaks."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from shared.types.request import SamplingParams
from tests.chaos.ledger import check_crashes, check_faults, check_requests, check_rest, percentile, stalls
from tests.chaos.records import Case, Expected, Fault, Piece, Rest, Seen

CASES = [
    Case(0, "/v1/completions", {}, (1, 2, 3), SamplingParams(4), 2),
    Case(1, "/v1/completions", {}, (4, 5), SamplingParams(4), 1, abort_after=2),
]
EXPECTED = {
    0: [
        Expected((97, 98, 99, 100), "length", "abcd", ((-1.0, (-1.0, -2.0)),) * 4),
        Expected((97, 258), "stop", "a", ((-1.0, (-1.0, -2.0)),) * 2),
    ],
    1: [Expected((65, 66, 67, 68), "length", "ABCD")],
}


def usage(prompt: int, completion: int, cached: int = 0) -> dict:
    total = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return total | {"prompt_tokens_details": {"cached_tokens": cached}}


def good() -> list[Seen]:
    """What clients of a faultless system see: one whole answer, one left early."""
    whole = Seen(
        number=0,
        began=1.0,
        status=200,
        pieces=[
            Piece(1.1, 0, (97,)),
            Piece(1.1, 1, (97, 258)),
            Piece(1.2, 0, (98, 99)),
            Piece(1.9, 0, (100,)),
        ],
        texts={0: "abcd", 1: "a"},
        finishes={0: ["length"], 1: ["stop"]},
        logprobs={0: [(-1.0, (-1.0, -2.0))] * 4, 1: [(-1.0, (-1.0, -2.0))] * 2},
        prompt=(1, 2, 3),
        usage=usage(3, 6, 2),
    )
    whole.end("done", 2.0)
    left = Seen(number=1, began=1.0, pieces=[Piece(1.5, 0, (65, 66))], prompt=(4, 5))
    left.end("left", 1.5)
    return [whole, left]


def rules(seen: list[Seen]) -> set[str]:
    return {violation.rule for violation in check_requests(CASES, EXPECTED, seen)}


def test_a_good_ledger_passes() -> None:
    assert check_requests(CASES, EXPECTED, good()) == []


def lose_a_token(seen: list[Seen]) -> None:
    seen[0].pieces[2] = Piece(1.2, 0, (98,))


def lose_the_last_token(seen: list[Seen]) -> None:
    del seen[0].pieces[3]


def double_a_token(seen: list[Seen]) -> None:
    seen[0].pieces.append(Piece(1.95, 0, (100,)))


def repeat_a_piece(seen: list[Seen]) -> None:
    seen[0].pieces.insert(3, seen[0].pieces[2])


def change_a_token(seen: list[Seen]) -> None:
    seen[0].pieces[0] = Piece(1.1, 0, (96,))


def swap_pieces(seen: list[Seen]) -> None:
    seen[0].pieces[2:4] = [Piece(1.2, 0, (100,)), Piece(1.9, 0, (98, 99))]


def give_a_token_to_another_choice(seen: list[Seen]) -> None:
    seen[0].pieces[3] = Piece(1.9, 1, (100,))


def invent_a_choice(seen: list[Seen]) -> None:
    seen[0].pieces.append(Piece(1.9, 2, (1,)))


def change_a_token_before_the_client_left(seen: list[Seen]) -> None:
    seen[1].pieces = [Piece(1.5, 0, (65, 67))]


def end_twice(seen: list[Seen]) -> None:
    seen[0].end("error", 2.1, "internal_error")


def never_end(seen: list[Seen]) -> None:
    seen[0].ending, seen[0].num_endings = "", 0


def fail(seen: list[Seen]) -> None:
    seen[0].ending, seen[0].error = "error", "worker_lost"


def cut(seen: list[Seen]) -> None:
    seen[0].ending = "cut"


def leave_unasked(seen: list[Seen]) -> None:
    seen[0].ending = "left"


def forget_a_request(seen: list[Seen]) -> None:
    del seen[0]


def answer_twice(seen: list[Seen]) -> None:
    seen.append(good()[0])


def answer_the_unasked(seen: list[Seen]) -> None:
    seen.append(msgspec.structs.replace(good()[0], number=7))


def finish_twice(seen: list[Seen]) -> None:
    seen[0].finishes[0] = ["length", "length"]


def finish_wrongly(seen: list[Seen]) -> None:
    seen[0].finishes[1] = ["length"]


def garble_the_text(seen: list[Seen]) -> None:
    seen[0].texts[0] = "abxd"


def change_a_logprob(seen: list[Seen]) -> None:
    seen[0].logprobs[0][2] = (-1.5, (-1.0, -2.0))


def lose_a_logprob(seen: list[Seen]) -> None:
    seen[0].logprobs[1].pop()


def count_too_much(seen: list[Seen]) -> None:
    seen[0].usage = usage(3, 7)


def count_nothing(seen: list[Seen]) -> None:
    seen[0].usage = None


def cache_more_than_there_is(seen: list[Seen]) -> None:
    seen[0].usage = usage(3, 6, 4)


def change_the_prompt(seen: list[Seen]) -> None:
    seen[0].prompt = (1, 2, 4)


FORGERIES: list[tuple[Callable[[list[Seen]], None], str]] = [
    (lose_a_token, "tokens"),
    (lose_the_last_token, "tokens"),
    (double_a_token, "tokens"),
    (repeat_a_piece, "tokens"),
    (change_a_token, "tokens"),
    (swap_pieces, "tokens"),
    (give_a_token_to_another_choice, "tokens"),
    (invent_a_choice, "tokens"),
    (change_a_token_before_the_client_left, "tokens"),
    (end_twice, "ending"),
    (never_end, "ending"),
    (fail, "ending"),
    (cut, "ending"),
    (leave_unasked, "ending"),
    (forget_a_request, "ending"),
    (answer_twice, "ending"),
    (answer_the_unasked, "ending"),
    (finish_twice, "finish"),
    (finish_wrongly, "finish"),
    (garble_the_text, "text"),
    (change_a_logprob, "logprobs"),
    (lose_a_logprob, "logprobs"),
    (count_too_much, "usage"),
    (count_nothing, "usage"),
    (cache_more_than_there_is, "usage"),
    (change_the_prompt, "prompt"),
]


@pytest.mark.parametrize(("forge", "rule"), FORGERIES, ids=[f.__name__ for f, _ in FORGERIES])
def test_a_forged_ledger_fails(forge: Callable[[list[Seen]], None], rule: str) -> None:
    seen = good()
    forge(seen)
    assert rule in rules(seen)


def test_leaks_are_named() -> None:
    rests = [Rest("decode-0", {"held": 0, "leases": 0}), Rest("prefill-1", {"held": 3, "waiting": 0})]
    assert [violation.detail for violation in check_rest(rests)] == ["prefill-1: held = 3"]


def fault(**fields) -> Fault:
    given = {"kind": "decode", "worker": "decode-0", "action": "kill", "pid": 5, "at": 1.3}
    return Fault(**(given | {"carried": 1, "struck": True, "back": True, "back_at": 1.6} | fields))


@pytest.mark.parametrize("lacking", [{"struck": False}, {"back": False}, {"carried": 0}])
def test_only_a_proven_fault_counts(lacking: dict) -> None:
    wanted = {("decode", "kill"): 1}
    assert check_faults([fault()], wanted) == []
    assert [v.rule for v in check_faults([fault(**lacking)], wanted)][-1] == "faults"
    assert [v.rule for v in check_faults([fault(kind="prefill")], wanted)] == ["faults"]


def test_a_worker_that_stays_away_is_a_violation() -> None:
    assert [v.detail for v in check_faults([fault(back=False)], {})] == ["decode-0 did not come back"]


def test_only_killed_processes_may_die() -> None:
    assert check_crashes([fault()], {"decode-0": 1, "router": 0}, []) == []
    assert [v.rule for v in check_crashes([fault()], {"decode-0": 2, "router": 0}, [])] == ["crashes"]
    assert [v.rule for v in check_crashes([], {"router": 1}, [])] == ["crashes"]
    assert [v.rule for v in check_crashes([fault(action="freeze")], {"decode-0": 1}, [])] == ["crashes"]
    assert [v.detail for v in check_crashes([], {}, [("router", "oh")])] == ["router logged: oh"]


def test_a_stall_is_the_longest_wait_around_its_fault() -> None:
    assert stalls([fault()], good()) == {("decode", "kill"): [pytest.approx(0.7)]}
    assert stalls([fault(carried=0)], good()) == {}
    assert stalls([fault(at=9.0)], good()) == {("decode", "kill"): [0.0]}


def test_waits_during_a_freeze_are_not_a_kills() -> None:
    freeze = fault(action="freeze", at=1.25, back_at=5.0)
    found = stalls([fault(), freeze], good())
    assert found["decode", "freeze"] == [pytest.approx(0.7)]
    assert found["decode", "kill"] == [0.0]


def test_percentiles_go_by_nearest_rank() -> None:
    values = [float(i) for i in range(100, 0, -1)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([], 0.5)) == (50.0, 99.0, 0.0)
