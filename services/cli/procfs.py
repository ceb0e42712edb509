"""What the kernel says about a process and a port: identity, memory, CPU. Linux only; nothing is changed."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from shared.clock import Entropy

_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def start_ticks(pid: int) -> int | None:
    """When the process started, in ticks since boot; None when there is no such process (or it is a zombie).

    With the pid this identifies a process: a recycled pid has another start.
    """
    fields = _stat_fields(pid)
    if fields is None or fields[0] in {"Z", "X"}:
        return None
    return int(fields[19])


def with_argument(prefix: str) -> list[int]:
    """Processes of this user that have an argument which begins so."""
    wanted, found = b"\0" + os.fsencode(prefix), []
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            if entry.stat().st_uid == os.geteuid() and wanted in Path(entry.path, "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def with_open_file(path: Path) -> list[tuple[int, Path]]:
    """Processes of this user that have the file of this name open, deleted or not, each with a path at which
    exactly that file can be read. ``path`` has no symbolic links."""
    wanted = (str(path), f"{path} (deleted)")
    return [
        (pid, opened)
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc")))
        for opened in _open_files(pid)
        if _target(opened) in wanted
    ]


def _open_files(pid: int) -> list[Path]:
    """None of another user's process, or of one that has ended meanwhile."""
    folder = Path(f"/proc/{pid}/fd")
    try:
        return [folder / fd for fd in os.listdir(folder)] if os.stat(folder).st_uid == os.geteuid() else []
    except OSError:
        return []


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def cpu_seconds(pid: int) -> float:
    """CPU time used so far, user and system; 0 when there is no such process."""
    fields = _stat_fields(pid)
    return 0.0 if fields is None else (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS


def uptime_s(started: int) -> float:
    """Seconds since a start given in ticks since boot."""
    since_boot = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return max(0.0, since_boot - started / _CLOCK_TICKS)


def pss_bytes(pid: int) -> int:
    """Proportional set size: shared pages are counted in parts. 0 when it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def available_memory_bytes() -> int:
    """Memory that new processes may use without swapping."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; the name before it may hold spaces."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def is_port_free(host: str, port: int) -> bool:
    """Whether a server could bind this TCP port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def internal_ports(host: str, entropy: Entropy) -> Iterator[int]:
    """Random free TCP ports, never the same twice.

    They lie below the range from which the kernel takes ports of outgoing connections, so that a process
    that is started again finds its port free.
    """
    low, high = 20_000, 32_000
    offset = entropy.seed() % (high - low)
    for step in range(high - low):
        port = low + (offset + step) % (high - low)
        if is_port_free(host, port):
            yield port
