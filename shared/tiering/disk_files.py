"""The files of a disk tier: one record a file, written whole or not at all.

Owns names, modes, direct I/O, durability and the lock; not which records are kept, nor the byte counter.
Layout: ``ab/<key in hex>`` (256 folders by the key's first byte), ``tmp/`` (files being written; what
is found there at start is a crash's), ``quarantine/``, ``lock`` (held by the one process that may be here).
Names are made here from keys and counters alone. Every call may block.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shared.errors import ConfigError
from shared.failpoints import FailpointError, Failpoints
from shared.tiering.offload import KEY_BYTES
from shared.tiering.record import ALIGNMENT, CorruptRecord

LOCK, TEMP, QUARANTINE = "lock", "tmp", "quarantine"
FOLDERS = tuple(f"{n:02x}" for n in range(256))
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW
_READ = os.O_RDONLY | os.O_NONBLOCK  # of a file; a pipe in its place keeps nobody waiting
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | _FLAGS


def occupied(nbytes: int) -> int:
    """What a file of ``nbytes`` counts: file systems give room by pages."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def path_of(key: bytes) -> str:
    name = key.hex()
    return f"{name[:2]}/{name}"


def key_of(path: str) -> bytes:
    """The key whose path this is; empty for a file of another name."""
    try:
        key = bytes.fromhex(path.rpartition("/")[2])
    except ValueError:
        return b""
    return key if len(key) == KEY_BYTES and path_of(key) == path else b""


class FileStat(NamedTuple):
    path: str
    nbytes: int
    mtime_ns: int
    is_file: bool


class Files:
    """An owned directory. Any thread; no two calls at once for one key.

    Raises ConfigError when the directory cannot be used, or is another's.
    """

    def __init__(self, directory: Path, failpoints: Failpoints) -> None:
        self._failpoints = failpoints
        self._numbers = itertools.count(1)
        self._temps: set[str] = set()
        self._scratch = threading.local()
        self._root = self._lock_fd = -1
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._lock_fd = self._lock()
            self._prepare()
        except OSError as error:
            self.close()
            raise ConfigError(f"the disk tier cannot use {directory}: {error.strerror}") from error
        except ConfigError:
            self.close()
            raise
        self.direct = self._can_direct()

    def _lock(self) -> int:
        if LOCK not in (names := os.listdir(self._root)) and names:
            raise ConfigError("the directory of a disk tier must be empty or its own")
        try:
            fd = self._open(LOCK, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            fd = self._open(LOCK, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise ConfigError("the disk tier's directory is in use by another process") from None
        return fd

    def _prepare(self) -> None:
        if stat.S_IMODE(os.fstat(self._root).st_mode) != 0o700:
            os.fchmod(self._root, 0o700)
        for name in (*FOLDERS, TEMP, QUARANTINE):
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._root)
            os.close(os.open(name, _DIRECTORY, dir_fd=self._root))  # a symlink is refused here
        for file in self.listing(TEMP):
            self.unlink(file.path)

    def _can_direct(self) -> bool:
        """Whether this file system takes direct I/O in whole pages."""
        path = f"{TEMP}/probe"
        try:
            fd = self._open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
            try:
                os.pwritev(fd, [self._scratch_of(ALIGNMENT)], 0)
            finally:
                os.close(fd)
        except OSError as error:
            return error.errno != errno.EINVAL
        finally:
            self.unlink(path)
        return True

    def now_ns(self) -> int:
        """The file system's own time, as it goes into files."""
        with contextlib.suppress(OSError):
            os.utime(self._lock_fd)
        return os.fstat(self._lock_fd).st_mtime_ns

    @contextlib.contextmanager
    def temp(self, key: bytes) -> Iterator[str]:
        """A name never used before by this process; nobody's orphan for the time being."""
        path = f"{TEMP}/{key.hex()}.{next(self._numbers)}"
        self._temps.add(path)
        try:
            yield path
        finally:
            self._temps.discard(path)

    def is_orphan(self, path: str) -> bool:
        """Whether a listed file is there still and nobody is writing it: in this order, since a file that
        has just been written bears its temporary name no more."""
        if path in self._temps:
            return False
        with contextlib.suppress(OSError):
            os.stat(path, dir_fd=self._root, follow_symlinks=False)
            return True
        return False

    def write(self, temp: str, key: bytes, header: bytes, payload: memoryview, mtime_ns: int) -> None:
        """Make the record's file: durable but for its name, which ``sync_folders`` sees to. Raises OSError
        and FailpointError; then ``temp`` may be left, for the caller to unlink."""
        hit = self._failpoints.hit
        hit("tier.before_write")
        fd = self._open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._direct_flag(payload))
        try:
            scratch = self._scratch_of(len(header))
            scratch[:] = header
            _write_all(fd, (scratch, payload))
            hit("tier.after_write")
            os.utime(fd, ns=(mtime_ns, mtime_ns))
            hit("tier.before_fsync")
            os.fsync(fd)
        finally:
            os.close(fd)
        hit("tier.before_rename")
        os.rename(temp, path_of(key), src_dir_fd=self._root, dst_dir_fd=self._root)
        try:
            hit("tier.after_rename")
        except FailpointError:
            self.unlink(path_of(key))
            raise

    def read(self, key: bytes, header_bytes: int, into: memoryview, mtime_ns: int) -> bytes:
        """Fill ``into`` and return the header. The file counts as used at ``mtime_ns``. Raises OSError, and
        CorruptRecord when the file is not exactly so long."""
        fd = self._open(path_of(key), _READ | self._direct_flag(into))
        try:
            header = self._scratch_of(header_bytes)
            total = header_bytes + into.nbytes
            if os.fstat(fd).st_size != total or _read_all(fd, (header, into)) != total:
                raise CorruptRecord("length")
            with contextlib.suppress(OSError):  # a read-only file system: nothing is remembered of today
                os.utime(fd, ns=(mtime_ns, mtime_ns))
            return bytes(header)
        finally:
            os.close(fd)

    def open_first_page(self, path: str) -> int:
        """A descriptor of a file whose first page is on its way, and nothing behind it."""
        fd = self._open(path, _READ)
        os.posix_fadvise(fd, 0, ALIGNMENT, os.POSIX_FADV_WILLNEED)
        return fd

    def size(self, path: str) -> int:
        """Bytes of a file; 0 when there is none."""
        try:
            return os.stat(path, dir_fd=self._root, follow_symlinks=False).st_size
        except OSError:
            return 0

    def unlink(self, path: str) -> bool:
        """Whether there is no such file (any more)."""
        try:
            os.unlink(path, dir_fd=self._root)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def rename(self, path: str, to: str) -> bool:
        """Whether ``path`` was there and is ``to`` now."""
        try:
            os.rename(path, to, src_dir_fd=self._root, dst_dir_fd=self._root)
        except OSError:
            return False
        return True

    def sync_folders(self, folders: Iterable[str]) -> None:
        """Make the names in these folders durable. Raises OSError."""
        for folder in folders:
            fd = os.open(folder, _DIRECTORY, dir_fd=self._root)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def listing(self, folder: str) -> Iterator[FileStat]:
        """What lies in a folder, subfolders left out; files that go meanwhile are passed over."""
        fd = os.open(folder, _DIRECTORY, dir_fd=self._root)
        try:
            for name in sorted(os.listdir(fd)):
                try:
                    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if not stat.S_ISDIR(status.st_mode):
                    is_file = stat.S_ISREG(status.st_mode)
                    yield FileStat(f"{folder}/{name}", status.st_size, status.st_mtime_ns, is_file)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Give the lock back. Calling it twice is safe."""
        for fd in (self._lock_fd, self._root):
            if fd >= 0:
                os.close(fd)
        self._lock_fd = self._root = -1

    def _open(self, path: str, flags: int) -> int:
        return os.open(path, flags | _FLAGS, 0o600, dir_fd=self._root)

    def _direct_flag(self, payload: memoryview) -> int:
        return os.O_DIRECT if self.direct and _is_aligned(payload) else 0

    def _scratch_of(self, nbytes: int) -> memoryview:
        """Page-aligned bytes of this thread's own, valid until its next call."""
        held: mmap.mmap | None = getattr(self._scratch, "buffer", None)
        if held is None or len(held) < nbytes:
            held = self._scratch.buffer = mmap.mmap(-1, occupied(nbytes))
        return memoryview(held)[:nbytes]


def _is_aligned(buffer: memoryview) -> bool:
    if buffer.nbytes % ALIGNMENT or not buffer.nbytes:
        return False
    address: int = np.frombuffer(buffer, np.uint8).ctypes.data
    return address % ALIGNMENT == 0


def _after(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of the buffers after ``done`` bytes."""
    rest = []
    for buffer in buffers:
        skipped = min(done, buffer.nbytes)
        done -= skipped
        if skipped < buffer.nbytes:
            rest.append(buffer.cast("B")[skipped:])
    return rest


def _write_all(fd: int, buffers: Sequence[memoryview]) -> None:
    done = 0
    while rest := _after(buffers, done):
        written = os.pwritev(fd, rest, done)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += written


def _read_all(fd: int, buffers: Sequence[memoryview]) -> int:
    done = 0
    while (rest := _after(buffers, done)) and (got := os.preadv(fd, rest, done)):
        done += got
    return done
