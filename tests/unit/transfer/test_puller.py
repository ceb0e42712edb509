"""A puller answers every pull, also one that breaks in a way nobody thought of."""

from __future__ import annotations

import queue
from typing import Any

from shared.clock import MonotonicClock
from shared.transfer.agent import NUM_SLOTS, TransferAgent
from shared.transfer.arena import Arena
from shared.transfer.handoff import BlockPull, Pull, PullOutcome
from shared.transfer.puller import Puller
from shared.types.transfer import AgentInfo, BlockRef, Endpoint
from tests.unit.transfer.test_agent import Switchboard


class Broken(Switchboard):
    def connect(self, peer_name: str, metadata: bytes) -> Any:
        raise OverflowError("no such process can be")


def test_a_pull_that_cannot_begin_is_answered_and_gives_its_slot_back() -> None:
    outcomes: queue.Queue[PullOutcome] = queue.Queue()
    with Arena.create("kv", (1,), (64,), "a" * 32) as arena:
        agent = TransferAgent("reader", "a" * 32, [Broken("shm")], {"kv": arena}, ("shm",))
        puller = Puller(
            agent,
            deliver=outcomes.put,
            notified=lambda payload: None,
            settled=lambda pull_id: None,
            clock=MonotonicClock(),
        )
        producer = AgentInfo("peer", "b" * 32, 1, (Endpoint("shm", b""),), (arena.info,))
        blocks = (BlockPull(BlockRef(0, 1, (1,)), 0),)
        for number in range(NUM_SLOTS + 1):
            puller.submit(Pull(str(number), producer, "kv", 0, blocks, 1))
        answers = [outcomes.get(timeout=20) for _ in range(NUM_SLOTS + 1)]
        assert {(a.ok, a.reason, a.terminal) for a in answers} == {((False,), "failed", True)}
        puller.close()
        agent.close()
