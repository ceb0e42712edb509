"""The judge of the parity check notices what it is there for."""

from __future__ import annotations

import pytest

from tests.e2e.cells import Cell
from tests.e2e.reference import TOP, Answer, Step, compare

VOCAB_SIZE = 1000
#: Two positions, each with the 40 likeliest ids.
REFERENCE = [Step(7 * n, {7 * n + i: -0.5 - i / 8 for i in range(2 * TOP)}) for n in range(2)]


def answer(**changes: object) -> Answer:
    tops = tuple(dict(list(step.logprobs.items())[:TOP]) for step in REFERENCE)
    right = Answer((0, 7), (-0.5, -0.5), tops)
    return right._replace(**changes)


def test_the_right_answer_is_right() -> None:
    assert compare(REFERENCE, answer(), VOCAB_SIZE) == (2, 0.0, "")


TOPS = answer().tops
WRONG = {
    "another token": answer(token_ids=(0, 8)),
    "a token short": answer(token_ids=(0,)),
    "a token too many": answer(token_ids=(0, 7, 9)),
    "another log-probability": answer(logprobs=(-0.5, -0.5002)),
    "an alternative of another value": answer(tops=(TOPS[0], {**TOPS[1], 9: -0.7502})),
    "an alternative left out": answer(tops=(TOPS[0], dict(list(TOPS[1].items())[1:]))),
    "one left out for a lesser": answer(
        tops=(TOPS[0], {**dict(list(TOPS[1].items())[:-1]), 7 + TOP: REFERENCE[1].logprobs[7 + TOP]})
    ),
    "an unlikely alternative": answer(tops=(TOPS[0], {**dict(list(TOPS[1].items())[1:]), 500: -0.5})),
    "a padding row": answer(tops=(TOPS[0], {**dict(list(TOPS[1].items())[1:]), VOCAB_SIZE: -0.5})),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_wrong(name: str) -> None:
    assert compare(REFERENCE, WRONG[name], VOCAB_SIZE).problem


def test_a_little_rounding_is_allowed() -> None:
    verdict = compare(REFERENCE, answer(logprobs=(-0.50005, -0.5)), VOCAB_SIZE)
    assert (verdict.problem, verdict.max_difference) == ("", pytest.approx(5e-5))


def test_a_cell_without_proof_has_a_problem() -> None:
    cell = Cell("name")
    cell.judge([REFERENCE], [answer()], VOCAB_SIZE)
    cell.prove("it happened", True)
    assert (cell.prompts, cell.tokens, cell.problems) == (1, 2, [])
    cell.prove("0 kills", False)
    assert cell.problems == ["no proof: 0 kills"] and cell.evidence == "it happened; 0 kills"
