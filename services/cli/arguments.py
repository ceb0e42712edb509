"""Values of command line options: each checks its text and says in words what it wanted."""

from __future__ import annotations

import argparse
import math


def port(text: str) -> int:
    """A TCP port."""
    if text.isdecimal() and 1 <= int(text) <= 65535:
        return int(text)
    raise argparse.ArgumentTypeError("a port lies between 1 and 65535")


def seconds(text: str) -> float:
    """A duration."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isfinite(value) and value > 0:
        return value
    raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, not {text!r}")


def count(text: str) -> int:
    """A number of things, perhaps none."""
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a whole number from 0 on, not {text!r}")
