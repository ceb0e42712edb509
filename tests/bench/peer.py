"""The peer that figures stand beside: transformers in a process of its own. Owns that process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.bench.figures import ROOT
from tests.bench.prompts import Prompt


class Variant(NamedTuple):
    """One way to run the peer; the best of all counts."""

    threads: int
    attention: str

    def __str__(self) -> str:
        return f"{self.threads} threads, {self.attention}"


class PeerStream(NamedTuple):
    """One answer; seconds since the call at which each token came."""

    arrivals: list[float]
    token_ids: list[int]

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


def variants(num_cores: int) -> list[Variant]:
    """Every combination that might be the best on this machine."""
    return [Variant(t, a) for a in ("sdpa", "eager") for t in sorted({1, num_cores})]


class Peer:
    """One running peer; idle between calls."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def one(self, variant: Variant, prompt: Prompt, num_tokens: int) -> PeerStream:
        """``generate`` for one prompt."""
        got = self._call("one", variant, prompt.token_ids, num_tokens)
        return PeerStream(got["arrivals"], got["token_ids"])

    def batch(
        self, variant: Variant, prompts: Sequence[Prompt], num_tokens: int
    ) -> tuple[list[list[int]], float]:
        """A static batch; token ids by prompt, and the seconds it took."""
        got = self._call("batch", variant, [prompt.token_ids for prompt in prompts], num_tokens)
        return got["token_ids"], got["seconds"]

    def _call(self, act: str, variant: Variant, prompt: Any, num_tokens: int) -> Any:
        stdin = self._process.stdin
        if stdin is None:
            raise RuntimeError("the peer has no input")
        call = {"act": act, **variant._asdict(), "prompt": prompt, "num_tokens": num_tokens}
        stdin.write(json.dumps(call) + "\n")
        stdin.flush()
        return _read(self._process)


@contextmanager
def peer(model_dir: Path) -> Iterator[Peer]:
    """Start it, wait until its weights are loaded, end it at exit. Its threads wait passively."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}
    environment.pop("OMP_NUM_THREADS", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.peer_main", str(model_dir)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        _read(process)
        yield Peer(process)
    finally:
        if process.stdin is not None:
            process.stdin.close()
        process.wait()


def _read(process: subprocess.Popen[str]) -> Any:
    line = process.stdout.readline() if process.stdout is not None else ""
    if not line:
        raise RuntimeError("the peer ended; see its messages above")
    return json.loads(line)
