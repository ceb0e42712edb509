"""Strikes workers and proves it: nobody is counted who was not seen dead, seen back, and seen at work.

Owns when and whom. The proof that requests were in flight is the router's own count of those that it had
to move elsewhere (encoder, prefill, decode), or calls that lay unread at a store that was held still for a
moment before it was killed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

from services.cli import procfs
from services.cli.topology import ProcessSpec
from shared.clock import Clock
from tests.chaos.cluster import POLL_S, Cluster
from tests.chaos.records import Fault

#: Encoders and the store answer within milliseconds, so they are held still until work lies with them.
HOLD_S = 0.4
FREEZE_S = 4.0
BACK_S = 30.0
#: How long the router may take to notice a death and move the requests.
MOVED_S = 5.0


class Striker:
    """Strikes one kind of worker in ``cluster``. ``faults`` grows with each strike, proven or not."""

    def __init__(self, cluster: Cluster, kind: str, clock: Clock, rng: random.Random) -> None:
        self._cluster = cluster
        self.kind = kind
        self._clock = clock
        self._rng = rng
        self.faults: list[Fault] = []

    async def run(self, kills: int, freezes: int, pause_s: tuple[float, float], give_up_s: float) -> None:
        """Until so many strikes of each sort are proven, or ``give_up_s`` has passed: one at a time, each
        after a random pause, and only while all workers of the kind are there."""
        wanted = ["kill"] * kills + ["freeze"] * freezes
        self._rng.shuffle(wanted)
        give_up_at = self._clock.now() + give_up_s
        while wanted and self._clock.now() < give_up_at:
            await asyncio.sleep(self._rng.uniform(*pause_s))
            await self._cluster.until_kind_whole(self.kind)
            spec = self._rng.choice(self._cluster.of_kind(self.kind))
            fault = await (self._kill(spec) if wanted[-1] == "kill" else self._freeze(spec))
            if fault.verified:
                wanted.pop()

    async def _kill(self, spec: ProcessSpec) -> Fault:
        fault = Fault(spec.kind, spec.name, "kill", self._cluster.pid(spec.name))
        self.faults.append(fault)
        started = procfs.start_ticks(fault.pid)
        moved_before = await self._num_moved()
        unread = 0
        if spec.kind in ("encoder", "kv_store"):
            os.kill(fault.pid, signal.SIGSTOP)
            unread = await self._hold(spec)
        else:
            await self._until_busy(spec)
        fault.at = self._clock.now()
        os.kill(fault.pid, signal.SIGKILL)
        await self._until_gone(fault, started)
        await self._until_back(fault, spec)
        fault.carried = unread if spec.kind == "kv_store" else await self._num_moved() - moved_before
        return fault

    async def _freeze(self, spec: ProcessSpec) -> Fault:
        fault = Fault(spec.kind, spec.name, "freeze", self._cluster.pid(spec.name))
        self.faults.append(fault)
        moved_before, given_up_before = await self._num_moved(), await self._num_given_up()
        await self._until_busy(spec)
        fault.at = self._clock.now()
        os.kill(fault.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(FREEZE_S)
            stopped = process_state(fault.pid) == "T"
        finally:
            os.kill(fault.pid, signal.SIGCONT)
        fault.struck = stopped and await self._num_given_up() > given_up_before
        await self._until_back(fault, spec)
        fault.carried = await self._num_moved() - moved_before
        return fault

    async def _hold(self, spec: ProcessSpec) -> int:
        """Let work come to a process that stands still, for a while; returns how many connections have
        something unread."""
        for _ in range(round(HOLD_S / 0.01)):
            if unread := _num_unread(spec.config.server.port):
                # What an encoder has unread may be a lease's renewal: pictures come a little later.
                await asyncio.sleep(0.1 if spec.kind == "encoder" else 0.0)
                return unread
            await asyncio.sleep(0.01)
        return 0

    async def _until_busy(self, spec: ProcessSpec) -> None:
        """Until the worker itself says that it works on something (for a while; the proof comes later)."""
        for _ in range(100):
            status = await self._cluster.status(spec)
            if status is not None and status.num_running + status.num_waiting:
                return
            await asyncio.sleep(0.01)

    async def _until_gone(self, fault: Fault, started: int | None) -> None:
        for _ in range(100):
            if procfs.start_ticks(fault.pid) != started:
                fault.struck = started is not None
                return
            await asyncio.sleep(0.01)

    async def _until_back(self, fault: Fault, spec: ProcessSpec) -> None:
        """The router is connected to the worker's present process; after a kill that is another one."""
        give_up_at = self._clock.now() + BACK_S
        while self._clock.now() < give_up_at:
            node = (await self._cluster.nodes()).get(spec.name)
            pid = self._cluster.pid(spec.name)
            same = fault.action == "freeze"
            if node is not None and node.info.pid == pid and (pid == fault.pid) == same:
                fault.back, fault.back_at = True, self._clock.now()
                return
            await asyncio.sleep(POLL_S)

    async def _num_moved(self) -> int:
        """Requests that the router has moved since a worker of the kind failed them."""
        samples = await self._cluster.metrics(self._cluster.specs[0])
        return int(samples.value("triptych_migrations_total", phase=self.kind))

    async def _num_given_up(self) -> int:
        """Workers of the kind that the router took for lost since they were silent."""
        samples = await self._cluster.metrics(self._cluster.specs[0])
        return int(samples.value("triptych_workers_lost_total", kind=self.kind, reason="silent"))


def process_state(pid: int) -> str:
    """The kernel's letter for what a process does; "" when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _num_unread(port: int) -> int:
    """Connections to this local port on which bytes wait to be read."""
    count = 0
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text(encoding="ascii").splitlines()[1:]:
            _, local, _, _, queues, *_ = line.split()
            if int(local.rpartition(":")[2], 16) == port and int(queues.partition(":")[2], 16):
                count += 1
    return count
