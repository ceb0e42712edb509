"""One region of the store's memory: an arena, the agent that lets peers read it, the puller that fills it.

Owns their order of life. Callbacks of the puller come back to the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from shared.clock import MonotonicClock
from shared.config.services import StoreConfig
from shared.engine.observe import observe_pull
from shared.failpoints import Failpoints
from shared.tiering.pulls import Pulls
from shared.tiering.reactor import Reactor
from shared.transfer.agent import TransferAgent
from shared.transfer.arena import Arena
from shared.transfer.factory import make_backends
from shared.transfer.puller import Puller
from shared.types.identity import LayoutSpec
from shared.types.transfer import AgentInfo


class StoreMemory:
    """``release`` gets leases that readers give back by notification. ``agent_id`` is unique to the region:
    readers know one region an agent."""

    def __init__(
        self,
        config: StoreConfig,
        agent_id: str,
        incarnation: str,
        region: str,
        num_blocks: int,
        extents: tuple[int, ...],
        reactor: Reactor,
        failpoints: Failpoints,
        release: Callable[[list[str]], None],
        layout: LayoutSpec | None = None,
    ) -> None:
        self._layout = layout
        self.arena = Arena.create(region, (num_blocks,) * len(extents), extents, incarnation)
        backends = make_backends(config.transfer, f"{agent_id}-{incarnation}")
        self._agent = TransferAgent(
            agent_id, incarnation, backends, {region: self.arena}, config.transfer.order
        )
        self.pulls = Pulls(region, partial(observe_pull, "offer"))
        self._puller = Puller(
            self._agent,
            deliver=lambda outcome: reactor.post(lambda: self.pulls.on_outcome(outcome)),
            settled=lambda pull_id: reactor.post(lambda: self.pulls.on_settled(pull_id)),
            notified=lambda payload: reactor.post(lambda: release([payload.decode(errors="replace")])),
            clock=MonotonicClock(),
            deadline_s=config.transfer.deadline_s,
            failpoints=failpoints,
            verify=config.kv.verify,
        )
        self._puller.expect(True)
        self.pulls.bind(self._puller)

    def info(self) -> AgentInfo:
        return self._agent.info(self._layout)

    def set_epoch(self, epoch: int) -> None:
        self._agent.set_epoch(epoch)

    def close(self) -> None:
        """Afterwards nothing lands any more."""
        self._puller.close()
        self._agent.close()
        self.arena.close()
