"""Announcements: a worker tells each router that it is there (``control.proto``).

Owns the wire side of both ends. What a router makes of an announcement is behind ControlPort.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import grpc

from shared.errors import TriptychError
from shared.rpc import checks
from shared.rpc.client import open_channel, typed_errors
from shared.rpc.convert_worker import info_from_wire, info_to_wire, status_from_wire, status_to_wire
from shared.telemetry.logs import get_logger
from shared.types.worker import WorkerInfo, WorkerStatus
from triptych.v1 import control_pb2 as pb
from triptych.v1 import control_pb2_grpc

CALL_TIMEOUT_S = 2.0
MAX_BACKOFF_S = 2.0

log = get_logger(__name__)


class ControlPort(Protocol):
    """What a router offers to workers and to the command line."""

    async def announce(self, info: WorkerInfo) -> tuple[int, float]:
        """A worker is alive. Returns its epoch and after how many seconds it announces itself again."""
        ...

    async def withdraw(self, worker_id: str, incarnation: str) -> None:
        """A worker leaves; unknown ones are ignored."""
        ...

    def workers(self) -> Sequence[tuple[WorkerInfo, WorkerStatus | None]]:
        """The live workers, each with its last status."""
        ...


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """A ControlPort on the wire."""

    def __init__(self, port: ControlPort) -> None:
        self._port = port

    def add_to(self, server: grpc.aio.Server) -> None:
        control_pb2_grpc.add_ControlServiceServicer_to_server(self, server)

    async def Announce(self, request: pb.AnnounceRequest, context: object) -> pb.AnnounceResponse:
        checks.present(request, "info")
        epoch, heartbeat_s = await self._port.announce(info_from_wire(request.info))
        return pb.AnnounceResponse(epoch=epoch, heartbeat_s=heartbeat_s)

    async def Withdraw(self, request: pb.WithdrawRequest, context: object) -> pb.WithdrawResponse:
        worker_id = checks.text("worker_id", request.worker_id, checks.MAX_ID_CHARS, required=True)
        incarnation = checks.text("incarnation", request.incarnation, checks.MAX_ID_CHARS, required=True)
        await self._port.withdraw(worker_id, incarnation)
        return pb.WithdrawResponse()

    async def ListWorkers(self, request: pb.ListWorkersRequest, context: object) -> pb.ListWorkersResponse:
        return pb.ListWorkersResponse(
            workers=[
                pb.ListedWorker(
                    info=info_to_wire(info), status=None if status is None else status_to_wire(status)
                )
                for info, status in self._port.workers()
            ]
        )


class ControlClient:
    """A router's ControlService. Every method raises TriptychError."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._stub = control_pb2_grpc.ControlServiceStub(self._channel)

    async def announce(self, info: WorkerInfo, timeout_s: float = CALL_TIMEOUT_S) -> tuple[int, float]:
        """Returns the worker's epoch and the seconds until the next announcement."""
        with typed_errors():
            reply = await self._stub.Announce(pb.AnnounceRequest(info=info_to_wire(info)), timeout=timeout_s)
        return reply.epoch, checks.real("heartbeat_s", reply.heartbeat_s, 0.01, 3600)

    async def withdraw(self, worker_id: str, incarnation: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
        request = pb.WithdrawRequest(worker_id=worker_id, incarnation=incarnation)
        with typed_errors():
            await self._stub.Withdraw(request, timeout=timeout_s)

    async def workers(
        self, timeout_s: float = CALL_TIMEOUT_S
    ) -> list[tuple[WorkerInfo, WorkerStatus | None]]:
        with typed_errors():
            reply = await self._stub.ListWorkers(pb.ListWorkersRequest(), timeout=timeout_s)
        return [
            (info_from_wire(w.info), status_from_wire(w.status) if w.HasField("status") else None)
            for w in reply.workers
        ]

    async def close(self) -> None:
        await self._channel.close(None)


class Announcer:
    """Announces a worker to each router, every heartbeat, until closed.

    An unreachable router is tried again with growing pauses of at most ``MAX_BACKOFF_S``.
    """

    def __init__(
        self,
        routers: Sequence[str],
        info: Callable[[], WorkerInfo],
        on_epoch: Callable[[int], None],
    ) -> None:
        """``info`` gives the announcement of the moment. ``on_epoch`` is called on the event loop
        with each epoch that is higher than all before."""
        self._clients = [(address, ControlClient(address)) for address in routers]
        self._info = info
        self._on_epoch = on_epoch
        self._epoch = 0
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin; needs a running event loop."""
        self._tasks = [
            asyncio.create_task(self._announce_to(address, client)) for address, client in self._clients
        ]

    async def close(self) -> None:
        """Stop and withdraw from the routers that can be reached. Calling it twice is safe."""
        tasks, self._tasks = self._tasks, []
        clients, self._clients = self._clients, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._leave(client) for _, client in clients))

    async def _announce_to(self, address: str, client: ControlClient) -> None:
        backoff_s = 0.1
        reachable = False
        while True:
            try:
                epoch, pause_s = await client.announce(self._info())
            except TriptychError as error:
                if reachable:
                    log.warning("a router does not answer", router=address, code=error.code)
                reachable = False
                pause_s = backoff_s
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
            else:
                if not reachable:
                    log.info("announced to a router", router=address, epoch=epoch)
                reachable, backoff_s = True, 0.1
                if epoch > self._epoch:
                    self._epoch = epoch
                    self._on_epoch(epoch)
            await asyncio.sleep(pause_s)

    async def _leave(self, client: ControlClient) -> None:
        info = self._info()
        with suppress(TriptychError):  # a router out of reach will notice by itself
            await client.withdraw(info.worker_id, info.incarnation, timeout_s=0.5)
        await client.close()
