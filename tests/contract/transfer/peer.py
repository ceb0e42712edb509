"""A peer process for the transfer tests: an arena, an agent and a puller, driven by lines on stdin.

Run from the root as ``-m tests.contract.transfer.peer BACKEND INCARNATION EPOCH``. Each line is a command,
each answer one line of JSON.
"""

from __future__ import annotations

import base64
import json
import os
import sys

import msgspec
import numpy as np

from shared.clock import MonotonicClock
from shared.kernels.checksum import head_checksums
from shared.transfer.agent import TransferAgent
from shared.transfer.arena import Arena
from shared.transfer.base import TransferBackend
from shared.transfer.puller import Puller

HEADS = 2
NUM_BLOCKS = (16, 8)
EXTENT_BYTES = (4096, 12288)
#: Begins every answer.
MARK = "@@"


def content(group: int, seed: int) -> bytes:
    """What block content ``seed`` of a group is; any two seeds differ nearly everywhere."""
    return np.random.default_rng(seed).bytes(EXTENT_BYTES[group])


def make_backend(name: str, agent_name: str, port: int = 0) -> TransferBackend:
    """A backend by its name; ``port`` is where it listens, if it can be told."""
    if name == "shm":
        from shared.transfer.shm import ShmBackend

        return ShmBackend()
    if name == "tcp":
        from shared.transfer.tcp import TcpBackend

        return TcpBackend(port=port)
    if name == "mooncake":
        from shared.transfer.mooncake import MooncakeBackend

        return MooncakeBackend()
    from shared.transfer.nixl import NixlBackend

    return NixlBackend(agent_name)


class PeerState:
    """The process's one arena and what its commands do to it."""

    def __init__(self, backend: str, incarnation: str, epoch: int) -> None:
        self._backend = backend
        self.heard: list[str] = []
        self._begin(incarnation, epoch)

    def _begin(self, incarnation: str, epoch: int, port: int = 0) -> None:
        backend = make_backend(self._backend, f"peer@{incarnation}", port)
        self._port = getattr(backend, "port", 0)
        self.arena = Arena.create("kv", NUM_BLOCKS, EXTENT_BYTES, incarnation, epoch)
        self.agent = TransferAgent("peer", incarnation, [backend], {"kv": self.arena}, [self._backend])
        self.puller = Puller(
            self.agent,
            deliver=lambda outcome: None,
            settled=lambda pull_id: None,
            notified=lambda payload: self.heard.append(payload.decode()),
            clock=MonotonicClock(),
        )
        self.puller.expect(True)

    def end(self) -> None:
        self.puller.close()
        self.agent.close()
        self.arena.close()

    def restart(self, epoch: int) -> str:
        """End this life and begin another one at the same address: the same process, descriptors and, if it
        listens anywhere, the same port."""
        self.end()
        self._begin(f"{epoch:032x}", epoch, self._port)
        return self.info()

    def info(self) -> str:
        return base64.b64encode(msgspec.msgpack.encode(self.agent.info())).decode()

    def commit(self, group: int, block: int, seed: int) -> list[object]:
        """Reuse a block, as an engine does: generation first, then the bytes, then the checksums."""
        generations = self.arena.generations(group)
        generations[block] += 1
        extent = self.arena.block(group, block)
        extent[:] = content(group, seed)
        return [int(generations[block]), list(head_checksums(extent, HEADS))]

    def bump(self, group: int, block: int) -> None:
        self.arena.generations(group)[block] += 1

    def flip(self, group: int, block: int, bit: int) -> None:
        """Damage a block behind its checksum's back."""
        self.arena.block(group, block)[bit // 8] ^= 1 << bit % 8

    def epoch(self, epoch: int) -> None:
        self.agent.set_epoch(epoch)

    def notes(self) -> list[str]:
        return self.heard


def main() -> None:
    """Answer commands until stdin ends."""
    state = PeerState(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    print(MARK + json.dumps(state.info()), flush=True)
    for line in sys.stdin:
        name, *args = line.split()
        print(MARK + json.dumps(getattr(state, name)(*map(int, args))), flush=True)
    state.end()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
