"""A worker as the wire sees it: one port over either engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from shared.errors import InvalidRequest
from shared.types.worker import Command, Event, WorkerInfo, WorkerStatus


class Core(Protocol):
    """What both engines offer."""

    def submit(self, router_id: str, commands: list[Command]) -> None: ...
    def subscribe(self, router_id: str, deliver: Callable[[list[Event]], None]) -> Callable[[], None]: ...
    def status(self) -> WorkerStatus: ...
    def detached(self, router_id: str) -> None: ...
    def drain(self) -> None: ...


class EnginePort:
    """A ``shared.rpc.worker_stream.WorkerPort``; ``keep_media`` is None on workers that take none."""

    def __init__(
        self,
        core: Core,
        info: Callable[[], WorkerInfo],
        keep_media: Callable[[str, bytes], None] | None = None,
    ) -> None:
        self._core = core
        self._info = info
        self._keep_media = keep_media

    def info(self) -> WorkerInfo:
        return self._info()

    def submit(self, router_id: str, commands: list[Command]) -> None:
        self._core.submit(router_id, commands)

    def subscribe(self, router_id: str, deliver: Callable[[list[Event]], None]) -> Callable[[], None]:
        return self._core.subscribe(router_id, deliver)

    async def put_media(self, mm_hash: str, data: bytes) -> None:
        if self._keep_media is None:
            raise InvalidRequest("this worker takes no media")
        self._keep_media(mm_hash, data)

    def status(self) -> WorkerStatus:
        return self._core.status()

    def detached(self, router_id: str) -> None:
        self._core.detached(router_id)
