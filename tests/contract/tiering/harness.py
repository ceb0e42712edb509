"""Records for tests of tiers, and a driver that waits for a tier's jobs."""

from __future__ import annotations

import hashlib
import mmap
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shared.kernels.checksum import head_checksums
from shared.tiering.offload import JobDone, LoadItem, OffloadTier, Presence, StoreItem
from shared.tiering.record import KvRecord, Record, decode_header, encode_header, verify
from shared.types.identity import IdentityKey, LayoutSpec
from shared.types.kv import KVGroupSpec

IDENTITY = IdentityKey("model", "revision", "tokenizer", "float32")
#: Extents of 8,192 bytes; of 1,536 bytes, which no direct I/O can take.
ALIGNED = LayoutSpec((KVGroupSpec(1, 2, 32, "float32"),), 16)
UNALIGNED = LayoutSpec((KVGroupSpec(1, 3, 16, "bfloat16"),), 8)
LAYOUTS = (ALIGNED, UNALIGNED)


class Stored(NamedTuple):
    """A record with its payload in page-aligned memory."""

    item: StoreItem
    record: Record

    @property
    def key(self) -> bytes:
        return self.item.key

    @property
    def file_bytes(self) -> int:
        return -(-(len(self.item.header) + self.item.payload.nbytes) // 4096) * 4096


def aligned(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes))[:nbytes]


def make(n: int, layout: LayoutSpec = ALIGNED) -> Stored:
    """The ``n``-th block of one chain."""
    payload = aligned(layout.groups[0].extent_bytes(layout.block_size))
    payload[:] = hashlib.shake_128(b"payload %d" % n).digest(payload.nbytes)
    block_hash, parent = (hashlib.sha256(b"block %d" % i).digest() for i in (n, n - 1))
    content = KvRecord(0, block_hash, parent, tuple(range(n, n + layout.block_size)))
    checksums = head_checksums(payload, layout.groups[0].num_kv_heads)
    record = Record(IDENTITY, layout, content, checksums, payload.nbytes)
    return Stored(StoreItem(record.key, encode_header(record), payload), record)


def make_all(numbers: Iterable[int], layout: LayoutSpec = ALIGNED) -> list[Stored]:
    return [make(n, layout) for n in numbers]


class Driver:
    """Runs jobs of a tier to their end."""

    def __init__(self, tier: OffloadTier) -> None:
        self.tier = tier
        self._news = threading.Event()
        self._last = 0
        self._done: dict[int, JobDone] = {}
        #: Keys that the tier said so of.
        self.corrupt: set[bytes] = set()
        tier.set_wake(self._news.set)

    def next_id(self) -> int:
        self._last += 1
        return self._last

    def wait(self, job_id: int) -> JobDone:
        """The end of a job; AssertionError when it does not come or comes twice."""
        while job_id not in self._done:
            assert self._news.wait(30), "the tier never called"
            self._news.clear()
            self.collect()
        return self._done.pop(job_id)

    def collect(self) -> None:
        for done in self.tier.finished():
            assert done.job_id not in self._done
            self._done[done.job_id] = done

    def store(self, records: Sequence[Stored]) -> set[bytes]:
        """Keys that were stored."""
        job_id = self.next_id()
        self.tier.submit_store(job_id, [record.item for record in records])
        done = self.wait(job_id)
        assert not done.loaded and len(set(done.stored)) == len(done.stored)
        return set(done.stored)

    def load(self, records: Sequence[Stored]) -> tuple[dict[bytes, bytes], dict[bytes, memoryview]]:
        """Headers of what was loaded, and every destination."""
        job_id = self.next_id()
        into = {record.key: aligned(record.item.payload.nbytes) for record in records}
        self.tier.submit_load(job_id, [LoadItem(key, buffer) for key, buffer in into.items()])
        done = self.wait(job_id)
        assert not done.stored
        self.corrupt.update(done.corrupt)
        return dict(done.loaded), into

    def good(self, records: Sequence[Stored]) -> set[bytes]:
        """Keys that were loaded; each verifies as what was stored, or verify raises."""
        headers, into = self.load(records)
        for stored in records:
            if stored.key in headers:
                wanted = stored.record
                found = decode_header(headers[stored.key])
                verify(found, into[stored.key], wanted.content, wanted.identity, wanted.layout)
        return set(headers)

    def settle(self) -> None:
        """Until the tier has nothing to do that an empty job would come before."""
        self.store([])

    def present(self, records: Sequence[Stored]) -> list[int]:
        """Positions of the records that are there."""
        answers = self.tier.lookup([record.key for record in records])
        return [n for n, answer in enumerate(answers) if answer is Presence.YES]
