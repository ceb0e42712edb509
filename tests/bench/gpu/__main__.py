"""All that is checked and timed on a GPU, in one run: `python -m tests.bench.gpu [--only PART ...]`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import triton

from tests.bench.figures import Figure, record, save
from tests.bench.gpu import attention, gather, steps
from tests.provenance import where_and_when

PARTS: dict[str, Callable[[], list[Figure]]] = {
    "gather": gather.measure,
    "attention": attention.measure,
    "steps": steps.measure,
    "invariant": steps.invariant,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--out", type=Path, help="a folder for gpu.json; default: printed only")
    args = parser.parse_args(argv)
    figures = [figure for part in args.only for figure in _shown(PARTS[part]())]
    if args.out is not None:
        card = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
        save(record("gpu", where_and_when(**card), figures), args.out)
    return 0


def _shown(figures: list[Figure]) -> list[Figure]:
    for figure in figures:
        goal = f" [{figure.goal:.4g}]" if figure.goal else ""
        print(f"{figure.name}: {figure.value:.4g} {figure.unit}{goal}", flush=True)
    return figures


if __name__ == "__main__":
    raise SystemExit(main())
