"""How a chaos run is shown and kept. Owns words and files, no judgement."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos.controls import Control
from tests.chaos.ledger import percentile
from tests.chaos.scenario import Outcome
from tests.provenance import ROOT, where_and_when

RESULTS = ROOT / "bench" / "results"


def passed(outcome: Outcome, controls: Sequence[Control]) -> bool:
    """No promise was broken, and the controls went as they must."""
    return not outcome.violations and all(control.as_it_must for control in controls)


def show(outcome: Outcome, controls: Sequence[Control]) -> str:
    """The tables, the first violations, and the one line last."""
    lines = [
        f"{'worker':<10} {'fault':<7} {'injected':>8} {'verified':>8} {'stall p50':>10} {'stall p99':>10}"
    ]
    for row in _fault_rows(outcome):
        lines.append(
            f"{row['kind']:<10} {row['action']:<7} {row['injected']:>8} {row['verified']:>8} "
            f"{row['stall_p50_s']:>8.2f} s {row['stall_p99_s']:>8.2f} s"
        )
    lines += [
        f"control: {c.name}: {c.detail}: {'as it must' if c.as_it_must else 'NOT AS IT MUST'}"
        for c in controls
    ]
    lines += [f"violated {v.rule}: request {v.number}: {v.detail}" for v in outcome.violations[:20]]
    figures = " ".join(f"{name}={value}" for name, value in _figures(outcome).items())
    lines.append(f"chaos {outcome.plan.seed} {figures} {'PASS' if passed(outcome, controls) else 'FAIL'}")
    return "\n".join(lines)


def save(outcome: Outcome, controls: Sequence[Control], path: Path) -> None:
    """Keep the figures as JSON."""
    record = {
        "bench": "chaos",
        **where_and_when(),
        "seed": outcome.plan.seed,
        "passed": passed(outcome, controls),
        "figures": _figures(outcome),
        "faults": _fault_rows(outcome),
        "controls": [{"name": c.name, "as_it_must": c.as_it_must, "detail": c.detail} for c in controls],
        "counters": outcome.counters,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _figures(outcome: Outcome) -> dict[str, Any]:
    endings = Counter(record.ending or "none" for record in outcome.seen)
    rules = Counter(violation.rule for violation in outcome.violations)
    return {
        "requests": len(outcome.cases),
        "done": endings["done"],
        "left": endings["left"],
        "failed": len(outcome.cases) - endings["done"] - endings["left"],
        "tokens": sum(len(piece.token_ids) for record in outcome.seen for piece in record.pieces),
        "wrong": rules["tokens"],
        "leaks": rules["leaks"],
        "violations": len(outcome.violations),
        "injected": len(outcome.faults),
        "verified": sum(fault.verified for fault in outcome.faults),
        "seconds": round(outcome.seconds, 1),
    }


def _fault_rows(outcome: Outcome) -> list[dict[str, Any]]:
    stalls = outcome.stalls
    keys = sorted({(fault.kind, fault.action) for fault in outcome.faults})
    rows = []
    for kind, action in keys:
        faults = [fault for fault in outcome.faults if (fault.kind, fault.action) == (kind, action)]
        waits = stalls.get((kind, action), [])
        rows.append(
            {
                "kind": kind,
                "action": action,
                "injected": len(faults),
                "verified": sum(fault.verified for fault in faults),
                "requests_moved": sum(fault.carried for fault in faults),
                "stall_p50_s": round(percentile(waits, 0.5), 3),
                "stall_p99_s": round(percentile(waits, 0.99), 3),
            }
        )
    return rows
