"""Judges a chaos run from its records alone: which promises were broken. Pure; knows no processes.

Rules: ``ending`` exactly one ending, and an allowed one; ``tokens`` the oracle's ids, none lost, doubled or
changed; ``text``, ``finish``, ``logprobs``, ``prompt``, ``usage`` agree with them; ``faults`` were what they
claim to be; ``crashes`` nobody died by itself; ``leaks`` nothing is held at rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from tests.chaos.records import Case, Expected, Fault, Rest, Seen, Violation

_LOGPROB_TOLERANCE = 1e-9
_ON_THE_WAY_S = 0.2


def check_requests(
    cases: Sequence[Case], expected: Mapping[int, Sequence[Expected]], seen: Iterable[Seen]
) -> list[Violation]:
    """Every case was seen once and as expected. ``expected``: one entry a choice, by case number."""
    by_number: dict[int, Seen] = {}
    found: list[Violation] = []
    known = {case.number for case in cases}
    for record in seen:
        if record.number in by_number or record.number not in known:
            found.append(Violation("ending", record.number, "a record too many"))
        by_number[record.number] = record
    for case in cases:
        one = by_number.get(case.number)
        if one is None:
            found.append(Violation("ending", case.number, "no record"))
        else:
            found += _check_one(case, expected[case.number], one)
    return found


def _check_one(case: Case, expected: Sequence[Expected], seen: Seen) -> Iterator[Violation]:
    def broken(rule: str, detail: str) -> Violation:
        return Violation(rule, case.number, detail)

    allowed = {"done", "left"} if case.abort_after else {"done"}
    if seen.num_endings != 1:
        yield broken("ending", f"{seen.num_endings} endings")
    elif seen.ending not in allowed:
        yield broken("ending", f"{seen.ending} {seen.error} (status {seen.status})")
    if any(not 0 <= piece.choice < case.n for piece in seen.pieces):
        yield broken("tokens", "a choice that was not asked for")
    for choice, want in enumerate(expected):
        if problem := _compare(want, seen.tokens(choice), whole=seen.ending == "done"):
            yield broken("tokens", f"choice {choice}: {problem}")
    if seen.prompt is not None and seen.prompt != case.prompt:
        yield broken("prompt", "the prompt's ids differ")
    if seen.ending == "done":
        for rule, detail in _check_whole(case, expected, seen):
            yield broken(rule, detail)


def _compare(want: Expected, got: tuple[int, ...], *, whole: bool) -> str:
    """What is wrong with these tokens; "" when nothing is. A part is right as far as it goes."""
    for index, (a, b) in enumerate(zip(want.token_ids, got, strict=False)):
        if a != b:
            return f"token {index} is {b}, not {a}"
    if len(got) > len(want.token_ids):
        return f"{len(got)} tokens, {len(want.token_ids)} expected"
    if whole and len(got) < len(want.token_ids):
        return f"only {len(got)} of {len(want.token_ids)} tokens"
    return ""


def _check_whole(case: Case, expected: Sequence[Expected], seen: Seen) -> Iterator[tuple[str, str]]:
    """What holds for an answer that came to its end."""
    for choice, want in enumerate(expected):
        if seen.finishes.get(choice) != [want.finish_reason]:
            finishes = seen.finishes.get(choice)
            yield "finish", f"choice {choice}: {finishes}, not one {want.finish_reason!r}"
        if seen.texts.get(choice, "") != want.text:
            yield "text", f"choice {choice}: the text is not that of the tokens"
        if problem := _compare_logprobs(want, seen.logprobs.get(choice, ())):
            yield "logprobs", f"choice {choice}: {problem}"
    if seen.prompt is None:
        yield "prompt", "the prompt's ids were not given"
    total = sum(len(want.token_ids) for want in expected)
    usage = seen.usage or {}
    counts = (usage.get("prompt_tokens"), usage.get("completion_tokens"), usage.get("total_tokens"))
    if counts != (len(case.prompt), total, len(case.prompt) + total):
        yield "usage", f"{counts} for a prompt of {len(case.prompt)} and {total} tokens"
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if not isinstance(cached, int) or not 0 <= cached <= len(case.prompt):
        yield "usage", f"{cached} cached tokens"


def _compare_logprobs(want: Expected, got: Sequence[tuple[float, tuple[float, ...]]]) -> str:
    if len(want.logprobs) != len(got):
        return f"{len(got)} entries, {len(want.logprobs)} expected"
    for index, ((a, tops), (b, others)) in enumerate(zip(want.logprobs, got, strict=True)):
        same = len(tops) == len(others) and all(map(_close, (a, *tops), (b, *others)))
        if not same:
            return f"entry {index} differs"
    return ""


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=0, abs_tol=_LOGPROB_TOLERANCE)


def check_rest(rests: Iterable[Rest]) -> list[Violation]:
    """Nothing is held at rest."""
    return [
        Violation("leaks", -1, f"{rest.process}: {name} = {count}")
        for rest in rests
        for name, count in rest.counts.items()
        if count
    ]


def check_faults(faults: Sequence[Fault], wanted: Mapping[tuple[str, str], int]) -> list[Violation]:
    """Enough verified faults by (kind, action), and every struck worker came back."""
    found = [
        Violation("faults", -1, f"{fault.worker} did not come back") for fault in faults if not fault.back
    ]
    for (kind, action), count in wanted.items():
        verified = sum(f.verified for f in faults if (f.kind, f.action) == (kind, action))
        if verified < count:
            found.append(Violation("faults", -1, f"{kind}: {verified} verified {action}s of {count}"))
    return found


def check_crashes(
    faults: Sequence[Fault], restarts: Mapping[str, int], errors: Iterable[tuple[str, str]]
) -> list[Violation]:
    """Nobody died who was not killed (``restarts`` by process), and no error was logged (process, what)."""
    found = [Violation("crashes", -1, f"{process} logged: {what}") for process, what in errors]
    for process, count in restarts.items():
        kills = sum(fault.action == "kill" for fault in faults if fault.worker == process)
        if count != kills:
            found.append(
                Violation("crashes", -1, f"{process} died {count} times and was killed {kills} times")
            )
    return found


def stalls(faults: Sequence[Fault], seen: Sequence[Seen]) -> dict[tuple[str, str], list[float]]:
    """Of each verified fault the longest wait, in seconds, that a client had around it: a gap between two
    arrivals of one answer. By (kind, action). ``seen``: streamed answers only. Waits during a freeze are the
    freeze's, whatever else fell into them."""
    freezes = [(fault.at, fault.back_at) for fault in faults if fault.action == "freeze"]
    found: dict[tuple[str, str], list[float]] = {}
    for fault in faults:
        if fault.verified:
            kill = fault.action == "kill"
            # What had left a killed worker may still arrive; a frozen one is given requests for a while.
            latest = fault.at + _ON_THE_WAY_S if kill else fault.back_at
            gaps = (_gap(fault.at, latest, freezes if kill else [], record) for record in seen)
            found.setdefault((fault.kind, fault.action), []).append(max(gaps, default=0.0))
    return found


def _gap(instant: float, latest: float, others: Sequence[tuple[float, float]], seen: Seen) -> float:
    """The longest wait that ended after ``instant``, began at ``latest`` at the latest, and overlaps none of
    ``others``."""
    times = [seen.began, *(piece.at for piece in seen.pieces), seen.ended]
    gaps = (
        b - a
        for a, b in pairwise(times)
        if b >= instant and a <= latest and not any(b >= first and a <= last for first, last in others)
    )
    return max(gaps, default=0.0)


def percentile(values: Sequence[float], share: float) -> float:
    """By nearest rank; 0 for no values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
