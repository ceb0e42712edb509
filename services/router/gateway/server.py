"""The HTTP server under the gateway: owns the socket, uvicorn's settings and the process's open files."""

from __future__ import annotations

import asyncio
import functools
import logging
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from services.router.gateway.app import create_app
from services.router.gateway.limits import GatewayLimits
from services.router.gateway.protocol import GatewayProtocol
from shared.clock import Entropy
from shared.errors import ConfigError
from shared.types.inference import InferenceService

_log = logging.getLogger(__name__)

#: How long connections get to close once nothing runs any more.
GRACE_S = 2
#: Files that the process needs beside the gateway's connections.
_OTHER_FILES = 512


class GatewayServer:
    """The gateway over ``service`` on a socket of its own. ``start``, later ``stop``; on the event loop."""

    def __init__(
        self, service: InferenceService, limits: GatewayLimits, *, entropy: Entropy | None = None
    ) -> None:
        protocol: Any = functools.partial(GatewayProtocol, limits=limits, turned_away=set())
        self._server = _Server(
            uvicorn.Config(
                create_app(service, limits, entropy=entropy),
                loop="none",
                http=protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                date_header=False,
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        self._max_connections = limits.max_connections
        self._serving: asyncio.Task[None] | None = None

    def start(self, host: str, port: int) -> int:
        """Listen and serve; returns the port. Raises ConfigError when it is taken."""
        _allow_files(self._max_connections + _OTHER_FILES)
        listener = _listen(host, port)
        self._serving = asyncio.get_running_loop().create_task(self._server.serve([listener]))
        bound: int = listener.getsockname()[1]
        return bound

    async def stop(self) -> None:
        """Refuse new connections and let those that are open end within GRACE_S."""
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling: the process has one way down."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen for HTTP on port {port}: {error.strerror}") from None
    return listener


def _allow_files(wanted: int) -> None:
    """Let the process open so many files: accepting must not fail before the cap on connections says why."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        _log.warning("the limit on open files is below the cap on connections")
