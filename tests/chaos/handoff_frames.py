"""Proof: no pull over spoiled frames brings a wrong byte, and each of them is told from a good one.

The peer is a real process. Frames are spoiled twice over: what a read brings, by the faulty wrapper around
each backend, and the very bytes on the wire of backend tcp, by a proxy. References that a pull goes by are
spoiled too, and blocks between their commit and the read.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable

import msgspec
from msgspec import Struct

from shared.transfer.arena import HEADER_BYTES
from shared.transfer.faulty import Fault, FaultKind, FaultyBackend
from shared.transfer.handoff import PullOutcome
from shared.transfer.tcp_server import FRAME, REPLY
from shared.types.transfer import AgentInfo, BlockRef, Endpoint
from tests.chaos.handoff_base import Proof, Setting
from tests.chaos.proxy import Proxy, Way
from tests.contract.transfer.harness import Peer, Reader
from tests.contract.transfer.peer import EXTENT_BYTES, NUM_BLOCKS, content

#: Bits of the arena's header that no reader needs: its nonce.
NONCE_AT, NONCE_BYTES = 40, 16
NUM_REFS = 4
#: A frame that never comes is waited for so long.
DEADLINE_S = 0.25


async def prove(setting: Setting) -> list[Proof]:
    share = setting.lane.frames // 3
    return await asyncio.to_thread(
        lambda: [
            _faulty("shm", share, setting.seed),
            _faulty("tcp", share, setting.seed),
            _on_the_wire(share, setting.seed),
            _control(setting.seed),
        ]
    )


class _Case(Struct):
    """One pull to be spoiled: from where, which of the peer's blocks, and what they hold."""

    producer: AgentInfo
    refs: list[BlockRef]
    wanted: list[bytes]


class _Bulk:
    """Pulls of one reader from one peer, and what became of them."""

    def __init__(self, backend: str, seed: int, *, verify: bool = True) -> None:
        self.rng = random.Random(f"{seed}/frames/{backend}")
        self.peer = Peer(backend)
        self.reader = Reader(backend, {}, deadline_s=DEADLINE_S, verify=verify)
        self.plain = Reader(backend, None, deadline_s=DEADLINE_S, verify=verify)
        self.good = {block: self.peer.commit(1, block, block) for block in range(NUM_BLOCKS[1])}
        self.reasons: Counter[str] = Counter()
        self.wrong = self.uncounted = self.pulls = 0

    def case(self) -> _Case:
        blocks = self.rng.sample(sorted(self.good), NUM_REFS)
        return _Case(self.peer.info, [self.good[b] for b in blocks], [content(1, b) for b in blocks])

    def pull(self, case: _Case) -> PullOutcome:
        """Into blocks that hold something else."""
        return self._pull(self.reader, case)

    def _pull(self, reader: Reader, case: _Case) -> PullOutcome:
        for local in range(NUM_REFS):
            reader.arena.block(1, local)[:] = b"\xa5" * EXTENT_BYTES[1]
        return reader.pull(case.producer, 1, case.refs, list(range(NUM_REFS)))

    def between_commit_and_read(self, case: _Case) -> None:
        """One bit of a committed block turns over at the producer. Nothing stands around the backend of who
        reads, so that it may take its checksums in its own way."""
        victim, bit = case.refs[0].block_id, self.rng.randrange(8 * EXTENT_BYTES[1])
        self.peer.call("flip", 1, victim, bit)
        outcome = self._pull(self.plain, case)
        self.judge("between commit and read", case, outcome, reader=self.plain)
        self.peer.call("flip", 1, victim, bit)

    def judge(
        self,
        what: str,
        case: _Case,
        outcome: PullOutcome,
        *,
        harmless: bool = False,
        reader: Reader | None = None,
    ) -> None:
        self.pulls += 1
        for local, (ok, wanted) in enumerate(zip(outcome.ok, case.wanted, strict=True)):
            self.wrong += ok and (reader or self.reader).bytes_of(1, local) != wanted
        self.uncounted += (not outcome.reason) != harmless
        self.reasons[f"{what}: {outcome.reason or 'good'}"] += 1

    def close(self) -> None:
        self.reader.close()
        self.plain.close()
        self.peer.close()

    def proof(self, name: str) -> Proof:
        # After all that a good pull still is one; the first may find the link broken.
        self.pull(self.case())
        last = self.pull(self.case())
        passed = not (self.wrong or self.uncounted or last.reason) and self.peer.process.poll() is None
        figure = (
            f"{self.pulls} spoiled pulls: {self.wrong} wrong blocks taken, {self.uncounted} not told from "
            f"what they should be; the next one: {last.reason or 'good'}"
        )
        main = (self.wrong + self.uncounted, f"wrong or uncounted of {self.pulls}", 0)
        return Proof(name, passed, figure, {"reasons": dict(self.reasons)}, main=main)


# What reads bring, and what pulls go by.

#: A fence is the header, then the generations from the first block's to the last's, others' between them.
_FENCE_BYTES = HEADER_BYTES + 8 * NUM_BLOCKS[1]


def _flip_fence(bulk: _Bulk, case: _Case) -> bool:
    nonce = range(NONCE_AT, NONCE_AT + NONCE_BYTES)
    meant = [at for at in range(HEADER_BYTES) if at not in nonce]
    meant += [HEADER_BYTES + 8 * entry + at for entry in _entries(case) for at in range(8)]
    bit = 8 * bulk.rng.choice(meant) + bulk.rng.randrange(8)
    _inject(bulk, Fault(FaultKind.FLIP, bit), bulk.rng.choice((0, 2)))
    return False


def _flip_blocks(bulk: _Bulk, case: _Case) -> bool:
    _inject(bulk, Fault(FaultKind.FLIP, bulk.rng.randrange(8 * NUM_REFS * EXTENT_BYTES[1])), 1)
    return False


def _cut_fence(bulk: _Bulk, case: _Case) -> bool:
    # The last generation's low byte is gone in any case.
    most = HEADER_BYTES + 8 * max(_entries(case))
    _inject(bulk, Fault(FaultKind.TRUNCATE, bulk.rng.randint(1, most)), bulk.rng.choice((0, 2)))
    return False


def _cut_blocks(bulk: _Bulk, case: _Case) -> bool:
    _inject(bulk, Fault(FaultKind.TRUNCATE, bulk.rng.randrange(1, NUM_REFS * EXTENT_BYTES[1])), 1)
    return False


def _failed(bulk: _Bulk, case: _Case) -> bool:
    _inject(bulk, Fault(bulk.rng.choice((FaultKind.FAIL, FaultKind.LOSE))), bulk.rng.randrange(3))
    return False


def _reversed(bulk: _Bulk, case: _Case) -> bool:
    _inject(bulk, Fault(FaultKind.REVERSE), bulk.rng.randrange(3))
    return True


def _entries(case: _Case) -> list[int]:
    """Where in a fence the generations of these blocks are."""
    ids = [ref.block_id for ref in case.refs]
    return [block_id - min(ids) for block_id in ids]


def _inject(bulk: _Bulk, fault: Fault, after: int) -> None:
    backend = bulk.reader.backend
    if not isinstance(backend, FaultyBackend):
        raise TypeError("the reader injects nothing")
    backend.inject(fault, after)


_READS: tuple[Callable[[_Bulk, _Case], bool], ...] = (
    _flip_fence,
    _flip_blocks,
    _flip_blocks,
    _cut_fence,
    _cut_blocks,
    _failed,
    _reversed,
)


def _foreign_life(case: _Case, rng: random.Random) -> None:
    change: dict[str, object] = {"epoch": case.producer.epoch + 1}
    if rng.random() < 0.5:
        change = {"incarnation": f"{rng.getrandbits(128):032x}"}
    case.producer = msgspec.structs.replace(case.producer, **change)


def _old_generation(case: _Case, rng: random.Random) -> None:
    n = rng.randrange(NUM_REFS)
    case.refs[n] = msgspec.structs.replace(case.refs[n], generation=case.refs[n].generation + 1)


def _swapped_blocks(case: _Case, rng: random.Random) -> None:
    a, b = case.refs[:2]
    case.refs[0] = msgspec.structs.replace(a, block_id=b.block_id)
    case.refs[1] = msgspec.structs.replace(b, block_id=a.block_id)


def _foreign_sums(case: _Case, rng: random.Random) -> None:
    case.refs[0] = msgspec.structs.replace(case.refs[0], checksums=case.refs[1].checksums)


_REFERENCES = (_foreign_life, _old_generation, _swapped_blocks, _foreign_sums)


def _faulty(backend: str, count: int, seed: int) -> Proof:
    bulk = _Bulk(backend, seed)
    try:
        while bulk.pulls < count:
            case, lot = bulk.case(), bulk.rng.random()
            if lot < 0.7:
                way = bulk.rng.choice(_READS)
                harmless = way(bulk, case)
                bulk.judge(way.__name__, case, bulk.pull(case), harmless=harmless)
            elif lot < 0.9:
                spoil = bulk.rng.choice(_REFERENCES)
                spoil(case, bulk.rng)
                bulk.judge(spoil.__name__, case, bulk.pull(case))
            else:
                bulk.between_commit_and_read(case)
        injected = bulk.reader.injected.qsize()
        proof = bulk.proof(f"spoiled reads, {backend}")
        return msgspec.structs.replace(proof, passed=proof.passed and injected > 0.5 * count)
    finally:
        bulk.close()


# The bytes on the wire.


class _Wire:
    """Spoils one byte of what passes a proxy next, or ends the connection there. ``done`` once it did."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._way = Way.BACK
        self._at = -1
        self._cut = False
        self.done = True

    def arm(self) -> str:
        """For the next pull, on a connection that stands."""
        self._way = self._rng.choice((Way.THERE, Way.BACK, Way.BACK))
        self._cut = self._rng.random() < 0.1
        sizes = {Way.THERE: 2 * 96, Way.BACK: 2 * (REPLY.size + _FENCE_BYTES) + NUM_REFS * EXTENT_BYTES[1]}
        self._at = self._rng.randrange(sizes[self._way])
        self.done = False
        return f"{'cut' if self._cut else 'flip'} {self._way.value}"

    def change(self, way: Way, data: bytes) -> bytes | None:
        if self.done or way is not self._way:
            return data
        if self._at >= len(data):
            self._at -= len(data)
            return data
        self.done = True
        if self._cut:
            return None
        at = self._at
        # Two bytes of each frame mean nothing.
        if way is Way.THERE and at in (2, 3) and len(data) >= FRAME.size:
            at = 0
        return data[:at] + bytes((data[at] ^ 1 << self._rng.randrange(8),)) + data[at + 1 :]


def _on_the_wire(count: int, seed: int) -> Proof:
    bulk = _Bulk("tcp", seed)
    (endpoint,) = bulk.peer.info.endpoints
    metadata = msgspec.msgpack.decode(endpoint.metadata)
    proxy = Proxy((metadata["host"], metadata["port"]))
    metadata["port"] = proxy.port
    through = Endpoint(endpoint.backend, msgspec.msgpack.encode(metadata))
    bulk.peer.info = msgspec.structs.replace(bulk.peer.info, endpoints=(through,))
    wire = _Wire(bulk.rng)
    proxy.change = wire.change
    harmless = 0
    try:
        while bulk.pulls < count:
            while bulk.pull(bulk.case()).reason:  # so that a connection stands
                pass
            case, what = bulk.case(), wire.arm()
            outcome = bulk.pull(case)
            if not wire.done:  # beyond what this pull sent
                wire.done = True
                continue
            # In the nonce, or where a fence says something of other blocks, a flip changes nothing.
            harmless += not outcome.reason
            bulk.judge(what, case, outcome, harmless=not outcome.reason)
        proof = bulk.proof("spoiled bytes on the wire, tcp")
        figure = f"{proof.figure}; {harmless} flips in bytes without meaning"
        passed = proof.passed and harmless < 0.05 * count
        return msgspec.structs.replace(proof, passed=passed, figure=figure)
    finally:
        bulk.close()
        proxy.close()


def _control(seed: int) -> Proof:
    """Flipped blocks, and nobody looks."""
    bulk = _Bulk("shm", seed, verify=False)
    try:
        for _ in range(25):
            case = bulk.case()
            _flip_blocks(bulk, case)
            bulk.judge("flip", case, bulk.pull(case))
            bulk.between_commit_and_read(bulk.case())
    finally:
        bulk.close()
    figure = f"{bulk.wrong} wrong blocks taken in {bulk.pulls} spoiled pulls"
    return Proof("spoiled reads, nothing verified", bulk.wrong == 50, figure, control=True)
