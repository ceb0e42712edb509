"""Both ends of the transfer tests: a real peer process, and a local reader with its outcomes."""

from __future__ import annotations

import base64
import json
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from shared.clock import Clock, MonotonicClock
from shared.failpoints import Failpoints
from shared.transfer.agent import TransferAgent
from shared.transfer.arena import Arena
from shared.transfer.base import TransferBackend
from shared.transfer.faulty import Fault, FaultyBackend
from shared.transfer.handoff import BlockPull, Pull, PullOutcome
from shared.transfer.puller import Puller
from shared.types.transfer import AgentInfo, BlockRef
from tests.contract.transfer.peer import EXTENT_BYTES, HEADS, MARK, NUM_BLOCKS, make_backend

ROOT = Path(__file__).resolve().parents[3]
#: No test waits longer for anything; only a broken one waits at all.
PATIENCE_S = 20.0


class Peer:
    """A producer in a process of its own."""

    def __init__(self, backend: str, incarnation: str = "a" * 32, epoch: int = 1) -> None:
        argv = [sys.executable, "-m", "tests.contract.transfer.peer", backend, incarnation, str(epoch)]
        self.process = subprocess.Popen(
            argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.info = self._info()

    def _info(self) -> AgentInfo:
        return msgspec.msgpack.decode(base64.b64decode(self._answer()), type=AgentInfo)

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):  # libraries may print as well
                return json.loads(line.removeprefix(MARK))
        raise AssertionError("the peer process died")

    def call(self, name: str, *args: int) -> Any:
        """Run a command in the peer and return its answer."""
        self._say(name, *args)
        return self._answer()

    def _say(self, name: str, *args: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join([name, *map(str, args)]) + "\n")

    def restart(self) -> None:
        """Let it begin a new life at the same address; ``info`` is the new one."""
        self._say("restart", self.info.epoch + 1)
        self.info = self._info()

    def commit(self, group: int, block: int, seed: int) -> BlockRef:
        """Fill a block with ``content(group, seed)`` and commit it."""
        generation, checksums = self.call("commit", group, block, seed)
        return BlockRef(block, generation, tuple(checksums))

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it took effect."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


class Reader:
    """The local side: an arena of the same shape, and a puller whose callbacks go to queues."""

    def __init__(
        self,
        backend: str,
        schedule: Mapping[int, Fault] | None = None,
        *,
        clock: Clock | None = None,
        deadline_s: float = PATIENCE_S,
        failpoints: Failpoints | None = None,
        verify: bool = True,
        restart: Callable[[], None] = lambda: None,
    ) -> None:
        incarnation = "b" * 32
        self.arena = Arena.create("kv", NUM_BLOCKS, EXTENT_BYTES, incarnation)
        self.backend: TransferBackend = make_backend(backend, f"reader-{id(self)}")
        self.injected: queue.Queue[Fault] = queue.Queue()
        if schedule is not None:
            self.backend = FaultyBackend(self.backend, schedule, injected=self.injected.put, restart=restart)
        self.agent = TransferAgent("reader", incarnation, [self.backend], {"kv": self.arena}, [backend])
        self.outcomes: queue.Queue[PullOutcome] = queue.Queue()
        self.settled: queue.Queue[str] = queue.Queue()
        self.puller = Puller(
            self.agent,
            deliver=self.outcomes.put,
            settled=self.settled.put,
            notified=lambda payload: None,
            clock=clock or MonotonicClock(),
            deadline_s=deadline_s,
            failpoints=failpoints,
            verify=verify,
        )
        self._pulls = 0

    def submit(
        self, producer: AgentInfo, group: int, refs: list[BlockRef], local: list[int], **more: Any
    ) -> str:
        """Start a pull of ``refs`` into local blocks; returns its id."""
        self._pulls += 1
        blocks = tuple(BlockPull(ref, block) for ref, block in zip(refs, local, strict=True))
        pull = Pull(
            pull_id=f"pull-{self._pulls}",
            producer=producer,
            region="kv",
            group=group,
            blocks=blocks,
            checksum_heads=HEADS,
            **more,
        )
        self.puller.submit(pull)
        return pull.pull_id

    def pull(
        self, producer: AgentInfo, group: int, refs: list[BlockRef], local: list[int], **more: Any
    ) -> PullOutcome:
        """Pull and wait for the outcome."""
        self.submit(producer, group, refs, local, **more)
        return self.outcomes.get(timeout=PATIENCE_S)

    def bytes_of(self, group: int, block: int) -> bytes:
        return bytes(self.arena.block(group, block))

    def close(self) -> None:
        self.puller.close()
        self.agent.close()
        self.arena.close()


MakePeer = Callable[..., Peer]
MakeReader = Callable[..., Reader]
