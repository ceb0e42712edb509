"""The parity run on paper: a table for people, a JSON file for those who compare runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from tests.e2e.cells import Cell
from tests.e2e.reference import TOLERANCE, TOP
from tests.provenance import where_and_when


def show(cells: Sequence[Cell], seconds: float) -> None:
    """Print the table, what went wrong, and the verdict."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 150
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for name in ("", "cell", "prompts", "tokens", "max diff", "bit-equal", "s", "evidence"):
        right = name in {"prompts", "tokens", "max diff", "bit-equal", "s"}
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for cell in cells:
        mark = "[red]FAILED[/]" if cell.problems else "[green]equal[/]"
        counts = (str(cell.prompts), str(cell.tokens), f"{cell.max_difference:.1e}", str(cell.bit_equal))
        table.add_row(mark, cell.name, *counts, f"{cell.seconds:.0f}", cell.evidence)
    console.print(table)
    for cell in cells:
        for problem in cell.problems[:5]:
            console.print(f"[red]{cell.name}[/]: {problem}", soft_wrap=True)
    tokens = sum(cell.tokens for cell in cells)
    failed = sum(bool(cell.problems) for cell in cells)
    console.print(
        f"{tokens} tokens in {len(cells)} cells compared with transformers in float32 (top {TOP} "
        f"log-probabilities within {TOLERANCE:g}), {failed} cells failed, {seconds:.0f} s",
        soft_wrap=True,
    )


def write(path: Path, model: str, prompts: int, tokens: int, cells: Sequence[Cell], seconds: float) -> None:
    """Write the run as JSON."""
    record = {
        "bench": "parity",
        **where_and_when(torch=metadata.version("torch"), transformers=metadata.version("transformers")),
        "model": model,
        "prompts": prompts,
        "tokens": tokens,
        "top_logprobs": TOP,
        "tolerance": TOLERANCE,
        "passed": not any(cell.problems for cell in cells),
        "seconds": round(seconds, 1),
        "cells": [
            {
                "cell": cell.name,
                "prompts": cell.prompts,
                "tokens": cell.tokens,
                "max_logprob_difference": float(f"{cell.max_difference:.2e}"),
                "bit_equal_to_first": cell.bit_equal,
                "seconds": round(cell.seconds, 1),
                "evidence": cell.evidence,
                "problems": cell.problems,
            }
            for cell in cells
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
