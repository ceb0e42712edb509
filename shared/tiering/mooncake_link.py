"""This side of the process that holds Mooncake's client: its life, its stage, and pauses after failures.

Owns the rule that a master or a process that does not answer is left alone for a while; not what is stored.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from shared.clock import Clock
from shared.telemetry.logs import get_logger
from shared.tiering.mooncake_process import End, Reply, Request, Setup, receive_reply, send

_log = get_logger(__name__)

#: What the library says when the master does not answer.
_RPC_FAILED = -900
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
#: A start imports the library; a transfer to a holder that is gone takes seconds.
_START_S, _CALL_S, _END_S = 15.0, 10.0, 3.0
#: A call that takes longer is not to be waited for by a look-up.
_SLOW_S = 0.25


class Unavailable(Exception):
    """There is no answer now. It never crosses the border of the tier."""


class MooncakeLink:
    """Calls, one at a time, from one thread; ``paused``, ``answers`` and ``num_pauses`` may be
    read in any.

    The process is started by the first call, and again after it had to be ended. ``stage``: what a call's
    places are in; between calls it belongs to the caller.
    """

    def __init__(self, setup: Setup, stage_bytes: int, clock: Clock) -> None:
        self._setup = setup
        self._clock = clock
        self._fd = os.memfd_create("mooncake-stage")
        os.ftruncate(self._fd, stage_bytes)
        self.stage = memoryview(mmap.mmap(self._fd, stage_bytes))
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._num_failures = 0
        self._resume_at = 0.0
        self._busy_since: float | None = None
        self._is_set_up = False
        self.num_pauses = 0

    @property
    def paused(self) -> bool:
        """Calls are refused: the last one failed, not long ago."""
        return self._clock.now() < self._resume_at

    @property
    def answers(self) -> bool:
        """Whether a call would probably be answered soon: the last one was, and none takes long."""
        busy_since = self._busy_since
        late = busy_since is not None and self._clock.now() - busy_since > _SLOW_S
        return self._is_set_up and not late and not self._num_failures

    def call(self, request: Request) -> Reply:
        """Raises Unavailable, during a pause at once, otherwise after ``_START_S`` + ``_CALL_S`` at most."""
        if self.paused:
            raise Unavailable
        self._busy_since = self._clock.now()
        try:
            reply = self._exchange(self._channel or self._start(), request, _CALL_S)
        except (OSError, ValueError) as error:
            self._kill()
            self._pause(repr(error))
            raise Unavailable from error
        finally:
            self._busy_since = None
        if _RPC_FAILED in reply:
            self._pause("the master does not answer")
            raise Unavailable
        self._num_failures = 0
        return reply

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            fds = (theirs.fileno(), self._fd)
            argv = [sys.executable, "-m", "shared.tiering.mooncake_process", *map(str, fds)]
            self._process = subprocess.Popen(
                argv, pass_fds=fds, env=_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
        self._channel = ours
        status = self._exchange(ours, self._setup, _START_S)
        if status != [0]:
            raise ConnectionRefusedError(f"mooncake's set-up ended with {status}")
        self._is_set_up = True
        _log.info("mooncake is there", master=self._setup.master)
        return ours

    @staticmethod
    def _exchange(channel: socket.socket, request: Request, timeout_s: float) -> Reply:
        channel.settimeout(timeout_s)
        send(channel, request)
        return receive_reply(channel)

    def _pause(self, reason: str) -> None:
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**self._num_failures)
        self._num_failures = min(self._num_failures + 1, 16)
        self._resume_at = self._clock.now() + pause_s
        self.num_pauses += 1
        _log.warning("mooncake is left alone for a while", seconds=pause_s, reason=reason)

    def _kill(self) -> None:
        self._is_set_up = False
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._channel = self._process = None

    def close(self) -> None:
        """End the process; only one whose memory others use says good-bye, if there is a master to hear it.
        Calling it twice is safe."""
        if self._channel is not None and self._setup.segment_bytes and not self.paused:
            with suppress(OSError, ValueError):
                self._exchange(self._channel, End(), _END_S)
        self._kill()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _environment() -> dict[str, str]:
    """The library says on stderr what it answers as a number, too, and that at length: left out."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    return {"GLOG_minloglevel": "3", "MC_LOG_LEVEL": "ERROR", **os.environ, "PYTHONPATH": path}
