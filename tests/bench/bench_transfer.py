"""The handoff between two processes, beside memcpy and beside plain NIXL, all in one run.

python -m tests.bench.bench_transfer [--rounds 15] [--backends shm tcp nixl]

A producer has committed 640 blocks; 64 and 512 of them, in random order, go to random blocks of ours. In
every round each way of moving them has one turn, in an order drawn anew: a memcpy inside this process, a
backend's read alone, and a whole pull (both fences, checksums over all our bytes, the outcome).
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import queue
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import msgspec
import numpy as np

from shared.clock import MonotonicClock
from shared.config.services import TransferConfig
from shared.kernels.checksum import head_checksums
from shared.transfer.agent import TransferAgent
from shared.transfer.arena import Arena
from shared.transfer.base import ReadOp, ReadState
from shared.transfer.factory import make_backends
from shared.transfer.handoff import BlockPull, Pull, PullOutcome
from shared.transfer.puller import Puller
from shared.types.transfer import AgentInfo, BlockRef
from tests.bench.figures import Figure, record, save, table
from tests.bench.setting import end_on_sigterm, say, where
from tests.bench.transfer_peer import NUM_BLOCKS, TINY_BYTES, TransferPeer

#: SmolLM2-135M, 16 tokens: 30 layers x K and V x 3 kv_heads x 64.
_HEADS = 3
_BLOCKS = {"fp32": 737_280, "bf16": 368_640}
_COUNTS = (64, 512)
_NOTES = 100
_CONTROL_MS = 1.0
#: Least speed, as a share of the basis: bytes only, and with verification.
_GOALS = {"shm": ("memcpy", 0.9, 0.7), "nixl": ("plain nixl", 0.9, 0.8)}

Move = Callable[[], object]


class Choice:
    """Which blocks go where, drawn at random."""

    def __init__(self, count: int, refs: Sequence[BlockRef]) -> None:
        random = np.random.default_rng(count)
        self.remote = random.permutation(NUM_BLOCKS[0])[:count].tolist()
        self.local = random.permutation(NUM_BLOCKS[0])[:count].tolist()
        self.refs = [refs[block] for block in self.remote]


class Consumer:
    """This side: one arena, and for each backend a connection of its own and a puller of its own."""

    def __init__(self, extent_bytes: int, peer: AgentInfo, names: Sequence[str]) -> None:
        self._peer = peer
        incarnation = os.urandom(16).hex()
        self.arena = Arena.create("kv", NUM_BLOCKS, (extent_bytes, TINY_BYTES), incarnation)
        np.frombuffer(self.arena.buffer, np.uint8)[self.arena.info.data_offsets[0] :] = 1
        self._outcomes: queue.SimpleQueue[PullOutcome] = queue.SimpleQueue()
        self._agents = {(name, use): self._agent(name, use) for name in names for use in ("read", "pull")}
        self._pullers = {name: self._puller(self._agents[name, "pull"]) for name in names}
        endpoints = {endpoint.backend: endpoint.metadata for endpoint in peer.endpoints}
        self._links = {
            name: self._agents[name, "read"].backends[0].connect("producer", endpoints[name])
            for name in names
        }
        self._num_pulls = 0

    def _agent(self, name: str, use: str) -> TransferAgent:
        config = TransferConfig(order=(name,))  # type: ignore[arg-type]  # a backend's name
        unique = f"consumer-{use}-{os.getpid()}-{id(self)}"
        return TransferAgent("consumer", "c" * 32, make_backends(config, unique), {"kv": self.arena}, [name])

    def _puller(self, agent: TransferAgent) -> Puller:
        return Puller(
            agent,
            deliver=self._outcomes.put,
            settled=lambda pull_id: None,
            notified=lambda payload: None,
            clock=MonotonicClock(),
            deadline_s=60.0,
        )

    def ops(self, choice: Choice) -> list[ReadOp]:
        first, extent = self.arena.info.data_offsets[0], self.arena.info.extent_bytes[0]
        pairs = zip(choice.remote, choice.local, strict=True)
        return [ReadOp(first + r * extent, first + n * extent, extent) for r, n in pairs]

    def read(self, name: str, ops: Sequence[ReadOp]) -> None:
        """A backend's read, polled to its end."""
        backend = self._agents[name, "read"].backends[0]
        handle = backend.read(self._links[name], "kv", "kv", ops)
        while (state := backend.poll(handle)) is ReadState.PENDING:
            pass
        backend.release(handle)
        if state is not ReadState.DONE:
            raise RuntimeError(f"{name}: a read failed")

    def pull(self, name: str, group: int, refs: Sequence[BlockRef], local: Sequence[int]) -> None:
        """A whole pull, from its submission to its outcome."""
        self._num_pulls += 1
        blocks = tuple(map(BlockPull, refs, local))
        heads = len(refs[0].checksums)
        self._pullers[name].submit(Pull(f"pull-{self._num_pulls}", self._peer, "kv", group, blocks, heads))
        outcome = self._outcomes.get(timeout=60)
        if outcome.reason or outcome.backend != name:
            raise RuntimeError(f"{name}: a pull failed: {outcome.reason}")

    def notify(self, name: str, payload: bytes) -> None:
        self._pullers[name].notify(self._peer, payload)

    def check(self, choice: Choice) -> None:
        """Raises unless every chosen block holds the producer's bytes; then wipes them."""
        for ref, local in zip(choice.refs, choice.local, strict=True):
            block = self.arena.block(0, local)
            if head_checksums(block, _HEADS) != ref.checksums:
                raise RuntimeError("a block arrived wrong")
            np.frombuffer(block, np.uint8)[::4096] ^= 0xFF

    def close(self) -> None:
        for puller in self._pullers.values():
            puller.close()
        for agent in self._agents.values():
            agent.close()
        self.arena.close()


class Memcpy:
    """The C library's memcpy of the same blocks from memory of our own, where ``arena`` is copied first."""

    def __init__(self, arena: Arena, ops: Sequence[ReadOp]) -> None:
        self._source = mmap.mmap(-1, arena.info.nbytes)
        source = np.frombuffer(self._source, np.uint8)
        source[:] = 2
        for remote, local, nbytes in ops:
            self._source[remote : remote + nbytes] = arena.buffer[local : local + nbytes]
        base, start = np.frombuffer(arena.buffer, np.uint8).ctypes.data, source.ctypes.data
        self._moves = [(base + local, start + remote, nbytes) for remote, local, nbytes in ops]

    def __call__(self) -> None:
        for target, start, nbytes in self._moves:
            ctypes.memmove(target, start, nbytes)


class PlainNixl:
    """The library alone: descriptor lists prepared once, block indices a transfer."""

    def __init__(self, consumer: Consumer, peer: AgentInfo) -> None:
        import nixl_cu12._api as api

        metadata = next(e.metadata for e in peer.endpoints if e.backend == "nixl")
        described = msgspec.msgpack.decode(metadata)
        agent = api.nixl_agent(
            f"plain-{id(self)}", api.nixl_agent_config(backends=[], enable_prog_thread=False)
        )
        agent.create_backend("UCX", {})
        arena_np = np.frombuffer(consumer.arena.buffer, np.uint8)
        rows = [(arena_np.ctypes.data, arena_np.size, 0, "")]
        self._registered = agent.register_memory(rows, "DRAM", backends=["UCX"])
        name = agent.add_remote_agent(described["blob"])
        remote = next(r["address"] for r in described["regions"] if r["name"] == "kv")
        info = consumer.arena.info
        self._local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._rows(arena_np.ctypes.data, info), "DRAM")
        self._remote = agent.prep_xfer_dlist(name, self._rows(remote, info), "DRAM")
        self._agent = agent

    def _rows(self, base: int, info: Any) -> Any:
        rows = np.zeros((info.num_blocks[0], 3), np.uint64)
        extent = info.extent_bytes[0]
        rows[:, 0] = base + info.data_offsets[0] + extent * np.arange(info.num_blocks[0])
        rows[:, 1] = extent
        return rows

    def move(self, choice: Choice) -> None:
        agent = self._agent
        handle = agent.make_prepped_xfer("READ", self._local, choice.local, self._remote, choice.remote)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError("plain nixl: a transfer failed")

    def close(self) -> None:
        self._agent.release_dlist_handle(self._local)
        self._agent.release_dlist_handle(self._remote)
        self._agent.deregister_memory(self._registered)


def moves(
    consumer: Consumer, choice: Choice, names: Sequence[str], plain: PlainNixl | None
) -> dict[str, Move]:
    """Every way of moving these blocks, by name; each was seen to bring the right bytes."""
    ops = consumer.ops(choice)
    found: dict[str, Move] = {}
    for name in names:
        found[f"{name}, bytes only"] = lambda name=name: consumer.read(name, ops)
        found[f"{name}, verified"] = lambda name=name: consumer.pull(name, 0, choice.refs, choice.local)
    if plain is not None:
        found["plain nixl"] = lambda: plain.move(choice)
    consumer.read(names[0], ops)
    found["memcpy"] = Memcpy(consumer.arena, ops)
    for move in found.values():
        move()
        consumer.check(choice)
    return found


class Taken(NamedTuple):
    """Seconds on the wall, and of all this process's threads."""

    wall: float
    cpu: float


def in_turns(ways: dict[str, Move], rounds: int) -> dict[str, Taken]:
    """Medians of each, its turn drawn anew every round."""
    random = np.random.default_rng(rounds)
    names, taken = list(ways), {name: [] for name in ways}
    for _ in range(rounds):
        for at in random.permutation(len(names)).tolist():
            wall, cpu = time.perf_counter(), time.process_time()
            ways[names[at]]()
            taken[names[at]].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {name: Taken(*map(statistics.median, zip(*pairs, strict=True))) for name, pairs in taken.items()}


def control_ms(consumer: Consumer, peer: TransferPeer, name: str) -> dict[str, float]:
    """Medians of a handoff without bytes: a pull of one tiny block, and a notification until it is heard.
    Each begins with the one before heard."""
    pulls, ends = [], {}
    for number in range(_NOTES):
        began = time.perf_counter()
        consumer.pull(name, 1, [peer.refs[1][number % 64]], [number % 64])
        pulls.append(time.perf_counter() - began)
        ends[f"{name}-{number}"] = time.monotonic()
        consumer.notify(name, f"{name}-{number}".encode())
        time.sleep(0.02)
    time.sleep(0.1)
    heard = peer.heard()
    notes = [heard[key] - sent for key, sent in ends.items() if key in heard]
    if len(notes) < _NOTES:
        say(f"{name}: {_NOTES - len(notes)} notifications were lost")
    return {"pull": statistics.median(pulls) * 1e3, "notify": statistics.median(notes) * 1e3}


def copied_figures(title: str, seconds: dict[str, Taken], nbytes: int, names: Sequence[str]) -> list[Figure]:
    """Speeds as shares of the basis that has a goal, else of memcpy."""
    found: list[Figure] = []
    for name in names:
        basis, bytes_goal, verified_goal = _GOALS.get(name, ("memcpy", None, None))
        for kind, goal in (("bytes only", bytes_goal), ("verified", verified_goal)):
            share = seconds[basis].wall / seconds[f"{name}, {kind}"].wall
            said = f"{basis} = 1: {nbytes / seconds[basis].wall / 1e9:.1f} GB/s"
            found.append(Figure(f"{title}: {name}, {kind}", share, "x", goal, at_most=False, basis=said))
    return found


def speeds(taken: Taken, nbytes: int) -> str:
    return f"{nbytes / taken.wall / 1e9:.2f} GB/s ({nbytes / taken.cpu / 1e9:.2f} per CPU)"


def measure(dtype: str, names: Sequence[str], rounds: int) -> tuple[list[Figure], dict[str, Any]]:
    """All figures of one block size."""
    extent = _BLOCKS[dtype]
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    with TransferPeer(extent, _HEADS, names) as peer:
        consumer = Consumer(extent, peer.info, names)
        plain = PlainNixl(consumer, peer.info) if "nixl" in names else None
        for count in _COUNTS:
            say(f"{count} blocks of {dtype}")
            choice = Choice(count, peer.refs[0])
            seconds = in_turns(moves(consumer, choice, names, plain), rounds)
            title = f"{count} blocks of {extent / 1e3:.0f} kB ({dtype})"
            figures += copied_figures(title, seconds, count * extent, names)
            details[title] = {name: speeds(taken, count * extent) for name, taken in seconds.items()}
        if dtype == "bf16":
            for name in names:
                found = control_ms(consumer, peer, name)
                details[f"control, {name}"] = {key: round(ms, 3) for key, ms in found.items()}
                title = f"control messages of a handoff: {name}, pull of one tiny block"
                figures.append(Figure(title, found["pull"], "ms", _CONTROL_MS))
                title = f"control messages of a handoff: {name}, notification until heard"
                figures.append(Figure(title, found["notify"], "ms"))
        if plain is not None:
            plain.close()
        consumer.close()
    return figures, details


def main() -> None:
    parser = argparse.ArgumentParser(description="Figures of the handoff.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--backends", nargs="+", default=["shm", "tcp", "nixl"])
    args = parser.parse_args()
    end_on_sigterm()
    busy = where()
    names = [name for name in args.backends if name != "nixl" or find_spec("nixl_cu12")]
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    for dtype in _BLOCKS:
        found, more = measure(dtype, names, args.rounds)
        figures += found
        details |= more
    save(record("transfer", busy, figures, details))
    print(table(figures), flush=True)
    for title, speeds in details.items():
        print(f"{title}: " + ", ".join(f"{name} {value}" for name, value in speeds.items()), flush=True)
    sys.stderr.flush()
    os._exit(0)  # libraries of transports that are still loaded have nothing to say any more


if __name__ == "__main__":
    main()
