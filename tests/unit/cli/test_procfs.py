"""What the kernel says about this very process, and about ports."""

from __future__ import annotations

import itertools
import os
import socket

from services.cli import procfs
from shared.clock import CountingEntropy


def test_this_process_has_memory_cpu_and_an_age() -> None:
    pid = os.getpid()
    started = procfs.start_ticks(pid)
    assert started is not None and procfs.uptime_s(started) >= 0
    assert procfs.pss_bytes(pid) > 1 << 20
    assert procfs.cpu_seconds(pid) > 0
    assert procfs.available_memory_bytes() > 0


def test_a_process_that_is_not_there_has_nothing() -> None:
    nobody = 2**22 + 1
    assert procfs.start_ticks(nobody) is None
    assert procfs.pss_bytes(nobody) == 0 and procfs.cpu_seconds(nobody) == 0


def test_a_bound_port_is_not_free() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        assert not procfs.is_port_free("127.0.0.1", server.getsockname()[1])


def test_internal_ports_are_free_different_and_below_the_ephemeral_range() -> None:
    ports = list(itertools.islice(procfs.internal_ports("127.0.0.1", CountingEntropy(11_990)), 40))
    assert len(set(ports)) == 40
    assert all(20_000 <= port < 32_000 and procfs.is_port_free("127.0.0.1", port) for port in ports)
