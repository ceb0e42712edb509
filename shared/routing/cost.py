"""What serving a request one way or the other will cost, in seconds, as measured lately.

Owns the estimates and their arithmetic; pure but for what it is told. The policy compares, the trial of a
placement measures.

A cost is the time until a request is *rolling*: its decode worker has sent a token of its own, so prompt
and handoff are behind it. Apart that is prefill (a line over the tokens to be computed there) plus the
handoff (a line over the tokens to be moved); alone it is one line over the tokens to be computed, and
the time for which the streams of that worker are held up meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Weight that every older sample keeps when a new one comes.
KEEP = 0.85
#: What was not measured for so long is not known any more: so it is tried again.
FORGET_S = 60.0
#: A sample counts at most as so many times what was expected: one hiccup is not a trend.
MAX_SURPRISE = 3.0


@dataclass(slots=True)
class Line:
    """``seconds = fixed + slope * amount``, by least squares over samples that fade.

    While all amounts are alike the line goes through the origin (work), or is flat (what mostly takes its
    time however little there is, like a transfer).
    """

    proportional: bool = True
    keep: float = KEEP
    forget_s: float = FORGET_S
    _n: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0
    _last: float = field(default=float("-inf"))

    def add(self, amount: float, seconds: float, now: float) -> None:
        """Take in one measurement made at ``now`` (clock seconds)."""
        expected = self.predict(amount, now)
        if expected is None:
            self._n = self._x = self._y = self._xx = self._xy = 0.0
        elif expected > 0:
            seconds = min(seconds, MAX_SURPRISE * expected)
        k = self.keep
        self._n = k * self._n + 1
        self._x = k * self._x + amount
        self._y = k * self._y + seconds
        self._xx = k * self._xx + amount * amount
        self._xy = k * self._xy + amount * seconds
        self._last = now

    def predict(self, amount: float, now: float) -> float | None:
        """Seconds for ``amount``; None when nothing was measured lately."""
        if now - self._last > self.forget_s or not self._n:
            return None
        fixed, slope = self._fit()
        return fixed + slope * amount

    def slope(self, now: float) -> float:
        """Seconds that one more unit costs; 0 when nothing was measured lately."""
        return 0.0 if now - self._last > self.forget_s or not self._n else self._fit()[1]

    def _fit(self) -> tuple[float, float]:
        mean_x, mean_y = self._x / self._n, self._y / self._n
        variance = self._xx / self._n - mean_x * mean_x
        through_origin = mean_y / mean_x if mean_x > 0 else 0.0
        if mean_x <= 0:
            return mean_y, 0.0
        if variance < 0.01 * mean_x * mean_x:
            return (0.0, through_origin) if self.proportional else (mean_y, 0.0)
        slope = max(0.0, (self._xy / self._n - mean_x * mean_y) / variance)
        fixed = mean_y - slope * mean_x
        return (fixed, slope) if fixed >= 0 else (0.0, through_origin)


class CostModel:
    """Lines by worker. Workers that are gone are forgotten with time."""

    def __init__(self) -> None:
        self._prefill: dict[str, Line] = {}
        self._handoff: dict[str, Line] = {}
        self._alone: dict[str, Line] = {}

    def prefilled(self, prefill: str, work: float, seconds: float, now: float) -> None:
        """``prefill`` sent the first token; ``work`` in tokens, those ahead in its queue included."""
        self._line(self._prefill, prefill, now).add(work, seconds, now)

    def handed_off(self, decode: str, moved: float, seconds: float, now: float) -> None:
        """``decode`` went on so long after the first token; ``moved`` in tokens."""
        self._line(self._handoff, decode, now, proportional=False).add(moved, seconds, now)

    def served_alone(self, worker: str, work: float, seconds: float, now: float) -> None:
        """``worker`` did everything until it was rolling."""
        self._line(self._alone, worker, now).add(work, seconds, now)

    def apart(self, prefill: str, decode: str, work: float, moved: float, now: float) -> float | None:
        """Seconds until ``decode`` is rolling after ``prefill`` did the prompt; None: not known."""
        first = _predict(self._prefill, prefill, work, now)
        handoff = _predict(self._handoff, decode, moved, now)
        return None if first is None or handoff is None else first + handoff

    def alone(self, worker: str, work: float, num_streams: int, now: float) -> tuple[float, float] | None:
        """Seconds until ``worker`` is rolling by itself, and for which its ``num_streams`` are held up, added
        up. One that never did so is believed to compute like the prefill workers on average. None: not
        known."""
        own = _predict(self._alone, worker, work, now)
        lines = self._prefill.values() if own is None else (self._alone[worker],)
        known = [(p, line) for line in lines if (p := line.predict(work, now)) is not None]
        if not known:
            return None
        rolling = sum(p for p, _ in known) / len(known)
        return rolling, num_streams * work * sum(line.slope(now) for _, line in known) / len(known)

    def _line(self, lines: dict[str, Line], key: str, now: float, *, proportional: bool = True) -> Line:
        if key not in lines:
            for old in [k for k, line in lines.items() if line.predict(1.0, now) is None]:
                del lines[old]
            lines[key] = Line(proportional)
        return lines[key]


def _predict(lines: dict[str, Line], key: str, amount: float, now: float) -> float | None:
    line = lines.get(key)
    return None if line is None else line.predict(amount, now)
