"""What a disk tier finds when it starts: every header is read, and what does not verify is put aside.

Owns the walk over the directory, done before the tier serves; nothing of what happens later. One
thread, with the reads of the next files under way: threads would wait for each other, not for the disk.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from shared.tiering.disk_files import FOLDERS, Files, FileStat, occupied, path_of
from shared.tiering.record import ALIGNMENT, CorruptRecord, check_header, header_length

#: Files whose first page is asked for ahead of its turn.
READ_AHEAD = 128


class FoundRecord(NamedTuple):
    """An intact header in a file of its name and length; the rest is verified when it is loaded."""

    key: bytes
    header_bytes: int
    payload_bytes: int
    mtime_ns: int


class BadFile(NamedTuple):
    path: str
    counted_bytes: int
    reason: str


def scan(files: Files) -> tuple[list[FoundRecord], list[BadFile]]:
    """All records, the longest unused first, and all files that are none. Blocks."""
    found: list[FoundRecord] = []
    bad: list[BadFile] = []
    for file, fd in _opened(files):
        try:
            found.append(_record(file, fd))
        except CorruptRecord as error:
            bad.append(BadFile(file.path, occupied(file.nbytes), error.reason))
        except OSError:
            bad.append(BadFile(file.path, occupied(file.nbytes), "io"))
    found.sort(key=lambda record: record.mtime_ns)
    return found, bad


def _opened(files: Files) -> Iterator[tuple[FileStat, int]]:
    """Every file with a descriptor, valid for the one step; -1 for what has no business here."""
    ahead: deque[tuple[FileStat, int]] = deque()
    try:
        for folder in FOLDERS:
            for file in files.listing(folder):
                ahead.append((file, _begin(files, file)))
                if len(ahead) > READ_AHEAD:
                    yield ahead[0]
                    _close(ahead.popleft()[1])
        while ahead:
            yield ahead[0]
            _close(ahead.popleft()[1])
    finally:
        for _, fd in ahead:
            _close(fd)


def _begin(files: Files, file: FileStat) -> int:
    if not file.is_file:
        return -1
    try:
        return files.open_first_page(file.path)
    except OSError:
        return -1


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


def _record(file: FileStat, fd: int) -> FoundRecord:
    if fd < 0:
        raise CorruptRecord("key")
    header = os.pread(fd, ALIGNMENT, 0)
    if (length := header_length(header)) > len(header):
        header += os.pread(fd, length - len(header), len(header))
    key, payload_bytes = check_header(header)
    if file.path != path_of(key):
        raise CorruptRecord("key")
    if file.nbytes != len(header) + payload_bytes:
        raise CorruptRecord("length")
    return FoundRecord(key, len(header), payload_bytes, file.mtime_ns)
