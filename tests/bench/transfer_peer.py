"""The producer of the transfer bench: a process with committed blocks, and its handle.

python -m tests.bench.transfer_peer EXTENT_BYTES NUM_HEADS BACKEND ...
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from shared.clock import MonotonicClock
from shared.config.services import TransferConfig
from shared.kernels.checksum import head_checksums
from shared.transfer.agent import TransferAgent
from shared.transfer.arena import Arena
from shared.transfer.factory import make_backends
from shared.transfer.puller import Puller
from shared.types.transfer import AgentInfo, BlockRef
from tests.bench.figures import ROOT

#: Blocks of group 0, of the size under test, and of group 1, whose bytes cost nothing.
NUM_BLOCKS = (640, 64)
TINY_BYTES = 4096
#: Marks our lines: libraries may print as well.
_MARK = "@@"


class Committed(msgspec.Struct, frozen=True):
    """What the peer says of itself: its agent, and all of its blocks by group."""

    info: AgentInfo
    refs: tuple[tuple[BlockRef, ...], ...]


class TransferPeer:
    """A running producer; a context manager that ends it."""

    def __init__(self, extent_bytes: int, num_heads: int, backends: Sequence[str]) -> None:
        module = [sys.executable, "-m", "tests.bench.transfer_peer"]
        self._process = subprocess.Popen(
            [*module, str(extent_bytes), str(num_heads), *backends],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            committed = msgspec.msgpack.decode(base64.b64decode(self._answer()), type=Committed)
        except BaseException:
            self._end()
            raise
        self.info, self.refs = committed.info, committed.refs

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return line.removeprefix(_MARK)
        raise RuntimeError("the producer has died")

    def heard(self) -> dict[str, float]:
        """When each notification so far was heard, on the system's monotonic clock."""
        assert self._process.stdin is not None
        self._process.stdin.write("heard\n")
        self._process.stdin.flush()
        times: dict[str, float] = json.loads(self._answer())
        return times

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> TransferPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()


def _commit_all(arena: Arena, num_heads: int) -> tuple[tuple[BlockRef, ...], ...]:
    random = np.random.default_rng(0)
    refs: list[tuple[BlockRef, ...]] = []
    for group, (count, extent) in enumerate(zip(arena.info.num_blocks, arena.info.extent_bytes, strict=True)):
        arena.generations(group)[:] = 1
        for block in range(count):
            arena.block(group, block)[:] = random.bytes(extent)
        heads = num_heads if group == 0 else 1
        sums = [head_checksums(arena.block(group, block), heads) for block in range(count)]
        refs.append(tuple(BlockRef(block, 1, checksums) for block, checksums in enumerate(sums)))
    return tuple(refs)


def main() -> None:
    extent_bytes, num_heads, *names = sys.argv[1:]
    incarnation = os.urandom(16).hex()
    arena = Arena.create("kv", NUM_BLOCKS, (int(extent_bytes), TINY_BYTES), incarnation)
    refs = _commit_all(arena, int(num_heads))
    config = TransferConfig(order=tuple(names))  # type: ignore[arg-type]  # names of backends
    agent = TransferAgent(
        "producer", incarnation, make_backends(config, f"producer@{incarnation}"), {"kv": arena}, names
    )
    heard: dict[str, float] = {}
    puller = Puller(
        agent,
        deliver=lambda outcome: None,
        settled=lambda pull_id: None,
        notified=lambda payload: heard.setdefault(payload.decode(), time.monotonic()) and None,
        clock=MonotonicClock(),
    )
    puller.expect(True)  # as while leases are out
    committed = msgspec.msgpack.encode(Committed(agent.info(), refs))
    print(_MARK + base64.b64encode(committed).decode(), flush=True)
    for _ in sys.stdin:
        print(_MARK + json.dumps(heard), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
