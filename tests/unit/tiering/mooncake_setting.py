"""A Mooncake of its own on free ports: its master, and a process that holds the objects."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

PATIENCE_S = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Cluster:
    """``master`` is its address. Processes are started by ``start_...``, ended by ``close`` or ``kill``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port, self._metrics_port = free_port(), free_port()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.master = f"127.0.0.1:{self._port}"

    def start_master(self) -> None:
        self._start("mooncake_master", f"--rpc_port={self._port}", f"--metrics_port={self._metrics_port}")
        self._until_reachable(self._port)

    def start_holder(self, size: str = "64MB") -> None:
        """A process that gives memory and waits."""
        port = free_port()
        self._start(
            "mooncake_client",
            "--host=127.0.0.1",
            f"--port={port}",
            f"--global_segment_size={size}",
            f"--master_server_address={self.master}",
            "--metadata_server=P2PHANDSHAKE",
            "--protocol=tcp",
        )
        self._until_reachable(port)

    def _start(self, program: str, *options: str) -> None:
        # The wrappers beside Python start it as a child of theirs, which would outlive them.
        found = [Path(folder) / "mooncake" / program for folder in sys.path]
        path = next(path for path in found if path.is_file())
        with (self._folder / f"{program}.log").open("wb") as log:
            argv = [str(path), *options]
            environment = {**os.environ, "MC_TCP_ENABLE_CONNECTION_POOL": "1"}
            self._running[program] = subprocess.Popen(argv, stdout=log, stderr=log, env=environment)

    @staticmethod
    def _until_reachable(port: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def kill(self, program: str) -> None:
        process = self._running.pop(program)
        process.kill()
        process.wait()

    def close(self) -> None:
        for program in list(self._running):
            self.kill(program)
