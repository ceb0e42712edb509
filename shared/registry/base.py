"""Who is alive: the contract of a registry. It holds hints that workers rebuild by announcing."""

from __future__ import annotations

from abc import ABC, abstractmethod

from shared.types.worker import WorkerInfo


class RegistryUnavailable(Exception):
    """The registry did not answer. The caller treats it as "no news": nobody is lost for it."""


class Registry(ABC):
    """Live workers by id, with a fencing number (epoch) for each incarnation.

    Of one worker id only the newest incarnation is listed; an older one that still announces itself
    keeps its old epoch and stays unlisted. An entry lives ``ttl_s`` after its last announcement.
    Called on the event loop. Every method may raise RegistryUnavailable.
    """

    @abstractmethod
    async def announce(self, info: WorkerInfo) -> int:
        """Enter or refresh a worker; returns its epoch. A new incarnation gets a higher one than any
        before it, and never a lower one than ``info.agent.epoch``, which another registry gave it."""

    @abstractmethod
    async def withdraw(self, worker_id: str, incarnation: str) -> None:
        """Drop a worker's entry, if this incarnation is the one listed."""

    @abstractmethod
    async def workers(self) -> list[WorkerInfo]:
        """The listed workers, by worker id."""

    @abstractmethod
    async def close(self) -> None:
        """Give connections back. Calling it twice is safe."""
