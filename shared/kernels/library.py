"""Builds and loads the compiled CPU kernels (``native/*.c``) at first use.

Owns the compiler call, the cache of built libraries and the one handle. The library is keyed by
its sources, the compiler and the processor, so a cache shared by machines is safe. Where it cannot
be built ``library`` is None and every kernel runs its torch twin. Calls release the interpreter lock.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from shared.kernels import records

log = logging.getLogger(__name__)

_SOURCES = Path(__file__).with_name("native")
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC", "-pthread")
_BUILD_TIMEOUT_S = 120.0


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, built if need be; None where that is impossible (the reason is logged)."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        log.warning("no C compiler: kernels run as torch operations, several times slower")
        return None
    try:
        return _declare(ctypes.CDLL(str(build(compiler, cache_dir()))))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        log.warning("kernels run as torch operations, several times slower: %s", error)
        return None


def available() -> bool:
    """Whether the compiled kernels are used. With them a result never depends on the batch."""
    return library() is not None


def set_threads(count: int) -> int:
    """Size of the team that runs each kernel, the caller included; returns what was reached.

    The team is one for the process; a kernel that runs in another thread is waited for.
    """
    lib = library()
    return 1 if lib is None else int(lib.triptych_threads(count))


def cache_dir() -> Path:
    """Where built libraries are kept: ``$XDG_CACHE_HOME/triptych`` or ``~/.cache/triptych``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "triptych" / "kernels"


def build(compiler: str, directory: Path, name: str = "kernels") -> Path:
    """The library built from the source ``name``, from ``directory`` if it is there already.

    Several processes may build at once: the last rename wins and all are equal.
    Raises OSError or subprocess.SubprocessError.
    """
    target = directory / f"{name}-{_build_key(compiler)}.so"
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        output = Path(scratch) / target.name
        command = [compiler, *_FLAGS, str(_SOURCES / f"{name}.c"), "-o", str(output), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=_BUILD_TIMEOUT_S)
        output.replace(target)
    return target


def _build_key(compiler: str) -> str:
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=10)
    digest.update(version.stdout + repr(_FLAGS).encode() + platform.machine().encode() + _processor())
    return digest.hexdigest()[:24]


def _processor() -> bytes:
    """The first processor's model and features, without what changes from second to second."""
    try:
        first = Path("/proc/cpuinfo").read_bytes().split(b"\n\n", 1)[0]
    except OSError:
        return b""
    keys = (b"vendor_id", b"cpu family", b"model", b"flags", b"Features", b"CPU part")
    return b"\n".join(line for line in first.splitlines() if line.startswith(keys))


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    """Argument types, so that ctypes checks and converts them. Tensors are passed by address."""
    address, integer, number = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
    matrix, heads, batch = (ctypes.POINTER(r) for r in (records.Matrix, records.Heads, records.Batch))
    group, model, space = (ctypes.POINTER(r) for r in (records.KVGroup, records.Model, records.Workspace))
    signatures: dict[str, tuple[type, ...]] = {
        "triptych_linear": (address, address, integer, matrix, integer),
        "triptych_rms_norm": (address, address, address, integer, integer, number),
        "triptych_silu_mul": (address, address, integer, integer),
        "triptych_rotary_store": (address, address, address, heads, batch, group, integer),
        "triptych_attention": (address, address, heads, batch, group, integer),
        "triptych_decoder": (address, model, batch, space),
    }
    for name, types in signatures.items():
        function = getattr(lib, name)
        function.argtypes, function.restype = types, None
    lib.triptych_threads.argtypes, lib.triptych_threads.restype = (integer,), integer
    return lib
