"""All that is checked and timed on a GPU, in one run: `python -m tests.bench.gpu [--only PART ...]`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from tests.bench.gpu import attention, gather, steps

PARTS: dict[str, Callable[[], list[tuple[str, float, str]]]] = {
    "gather": gather.measure,
    "attention": attention.measure,
    "steps": steps.measure,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    args = parser.parse_args(argv)
    for part in args.only:
        for name, value, note in PARTS[part]():
            print(f"{part}: {name}: {value:.4g} ({note})", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
