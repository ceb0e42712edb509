"""What a measurement says: figures with goals, kept as JSON, shown as a table. Owns no measuring."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
README = ROOT / "bench" / "README.md"

_HEAD = """# Figures

Written by `make bench` from `bench/results/*.json`; each part shows its last run. Machines are noisy: what
stands beside a peer was measured in turns with it in one run, and the ratio is what to look at. *Ratio* is
the figure divided by its goal.
"""


@dataclass(frozen=True)
class Figure:
    """One measured number. ``goal`` is a bound in the same unit (None = shown for information);
    ``at_most`` says on which side of it the value must lie; ``basis`` says where the goal comes from."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    at_most: bool = True
    basis: str = ""

    @property
    def ratio(self) -> float | None:
        """Value over goal; None without one."""
        return self.value / self.goal if self.goal else None

    @property
    def met(self) -> bool | None:
        """Whether the value is on the right side of its goal; None without one."""
        if self.goal is None:
            return None
        return self.value <= self.goal if self.at_most else self.value >= self.goal


def record(
    part: str, where: Mapping[str, Any], figures: Sequence[Figure], details: Any = None
) -> dict[str, Any]:
    """A part's result as plain data."""
    rows = [asdict(f) | {"ratio": _rounded(f.ratio), "met": f.met} for f in figures]
    return {"bench": part, **where, "figures": rows, "details": details}


def save(result: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Write a part's result beside the others."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['bench']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path


def load(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """All results that hold a list of figures, by part."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return [result for result in found if isinstance(result.get("figures"), list)]


def figures_of(result: Mapping[str, Any]) -> list[Figure]:
    """The figures of a saved result; what is not part of a figure is passed over."""
    names = Figure.__dataclass_fields__.keys()
    return [Figure(**{k: v for k, v in row.items() if k in names}) for row in result["figures"]]


def table(figures: Iterable[Figure]) -> str:
    """Markdown: one line a figure."""
    lines = ["| figure | measured | goal | ratio | |", "|---|---:|---:|---:|---|"]
    for f in figures:
        ratio = "" if f.ratio is None else f"{f.ratio:.2f}"
        verdict = {True: "met", False: "**not met**", None: ""}[f.met]
        lines.append(f"| {f.name} | {_number(f.value)} {f.unit} | {_goal(f)} | {ratio} | {verdict} |")
    return "\n".join(lines)


def readme(results: Iterable[Mapping[str, Any]]) -> str:
    """The page of last measured tables."""
    parts = [_HEAD]
    for result in results:
        machine = result.get("machine", {})
        loads = " ".join(f"{load:.1f}" for load in result.get("load_average", ()))
        words = [result["date"], f"commit {result['commit']}"]
        words.append(f"{machine.get('cpu', 'unknown processor')}, {machine.get('cores', '?')} cores")
        words += [f"load average {loads}"] if loads else []
        parts.append(f"## {result['bench']}\n\n{'; '.join(words)}\n\n{table(figures_of(result))}\n")
    return "\n".join(parts)


def _goal(figure: Figure) -> str:
    if figure.goal is None:
        return ""
    sign = "at most" if figure.at_most else "at least"
    basis = f" ({figure.basis})" if figure.basis else ""
    return f"{sign} {_number(figure.goal)} {figure.unit}{basis}"


def _number(value: float) -> str:
    """Three significant digits, thousands set apart."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
