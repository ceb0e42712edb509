"""What the tests of the command line share: small real processes, and waiting for a condition."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from services.cli.topology import ProcessSpec
from shared.config.services import ModelConfig, StoreConfig

PATIENCE_S = 20.0
WITNESS = Path(__file__).parents[3] / "models" / "witness"


@dataclass(frozen=True)
class Script(ProcessSpec):
    """A process that runs a few lines of Python instead of a service."""

    source: str = ""

    def argv(self, config_file: Path) -> list[str]:
        return [sys.executable, "-S", "-c", self.source, str(config_file)]

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        return {**super().environment(base), "PYTHONPATH": ""}


def script(name: str, source: str, kind: str = "decode") -> Script:
    return Script(name, kind, StoreConfig(model=ModelConfig(path=str(WITNESS))), source)


def eventually(condition: Callable[[], bool]) -> None:
    """Return as soon as ``condition`` holds; a failure when it never does."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it never happened")
