"""KV blocks over all tiers: memory, one CPU tier a group, above a chain of slower ones.

Owns what is on its way up and who waits for it; leases, eviction and the jobs of lower tiers belong to
others. Single-threaded, never waits: a look-up answers by callback, at once when memory decides it.

A look-up of a prefix keeps what memory holds, loads what follows from below into reserved blocks, and is
answered when that has landed, by whatever prefix is in memory then; after ``deadline_s`` at the latest. A
block counts only when every group has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, zip_longest

from shared.telemetry import metrics
from shared.tiering.base import Filled
from shared.tiering.chain import NOWHERE
from shared.tiering.cpu import CpuTier
from shared.tiering.demotion import Candidate
from shared.tiering.leases import Pinned, PrefixLeases
from shared.tiering.lower import LowerTiers
from shared.tiering.offload import StoreItem
from shared.tiering.promotion import Load
from shared.tiering.record import (
    KvRecord,
    PayloadCheck,
    Record,
    decode_header,
    encode_header,
    record_key,
    verify,
)
from shared.transfer.arena import Arena
from shared.types.identity import IdentityKey, LayoutSpec
from shared.types.store import BlockKey

#: Gets the lease's id, empty without a hit, and what it pins.
Answer = Callable[[str, Pinned], None]


@dataclass(slots=True, eq=False)
class _Coming:
    """A block that is being loaded, for whom, and the look-ups that wait for it."""

    key: BlockKey
    block_id: int
    tenant: str
    waiting: list[_Search] = field(default_factory=list)


class KvTiers:
    """``cpu`` has one tier a group, over ``arena``."""

    def __init__(
        self,
        identity: IdentityKey,
        layout: LayoutSpec,
        arena: Arena,
        cpu: Sequence[CpuTier],
        lower: LowerTiers,
        leases: PrefixLeases,
    ) -> None:
        self._identity = identity
        self._layout = layout
        self._arena = arena
        self._cpu = cpu
        self._lower = lower
        self._leases = leases
        self._coming: dict[tuple[int, bytes], _Coming] = {}
        self._asking: list[_Search] = []
        self._queries = metrics.TIER_QUERIES.labels("cpu")
        self._hits = metrics.TIER_HITS.labels("cpu")

    def lookup(self, keys: Sequence[BlockKey], done: Answer, tenant: str = "") -> None:
        """Lease the longest prefix of ``keys`` (of each group consecutive blocks, in order) that can be in
        memory soon; ``done`` is called once. What is loaded for it counts for ``tenant``, who asks: a block's
        hash covers the salt, so that nobody else can."""
        groups = self._leases.grouped(keys)
        found = self._leases.find(groups)
        self._queries.inc(sum(map(len, groups)))
        self._hits.inc(sum(map(len, found)))
        if self._lower.chain.is_empty or len(found[0]) == min(map(len, groups)):
            self._answer(groups, found, done)
            return
        search = _Search(groups, len(found[0]), done, tenant)
        self._keep(search, found)
        self._advance(search)
        if not search.over:
            self._lower.reactor.later(self._lower.deadline_s, lambda: self._finish(search))

    def commit(self, group: int, blocks: Sequence[Filled]) -> None:
        """Offered blocks have arrived in the group's tier."""
        self._cpu[group].commit(blocks)
        self._used([(group, block.key) for block in blocks])

    def offered_again(self, group: int, keys: Sequence[BlockKey]) -> None:
        """Blocks that memory holds were offered by somebody, consecutive and in order."""
        self._cpu[group].use(keys)
        self._used([(group, key) for key in keys])

    def news(self) -> None:
        """Lower tiers may know more now."""
        asking, self._asking = self._asking, []
        for search in asking:
            self._advance(search)

    # A look-up.

    def _answer(self, groups: Sequence[Sequence[BlockKey]], found: Pinned, done: Answer) -> None:
        lease_id = self._leases.pin(groups, found)
        # Side by side, so that of what is written every group has its part.
        self._used([(g, keys[n]) for n in range(len(found[0])) for g, keys in enumerate(groups)])
        done(lease_id, found)

    def _keep(self, search: _Search, found: Pinned) -> None:
        for group, ids in enumerate(found):
            self._cpu[group].pin(ids)
            search.pinned[group].extend(ids)

    def _advance(self, search: _Search) -> None:
        """Begin the loads that a look-up lacks; finish it when it waits for nothing."""
        if search.over or search.num_waiting:
            return
        rows, places = self._reachable(search)
        search.front += len(rows)
        self._keep_held(search, rows)
        self._load(search, self._reserve(rows, search.tenant), places)
        if search.asked and not search.num_waiting:
            self._asking.append(search)
        elif not search.num_waiting:
            self._finish(search)

    def _row(self, search: _Search, position: int) -> list[_Step]:
        steps = []
        for group, keys in enumerate(search.groups):
            key = keys[position]
            coming = self._coming.get((group, key.block_hash))
            steps.append(_Step(group, key, self._cpu[group].find(key), coming))
        return steps

    def _reachable(self, search: _Search) -> tuple[list[list[_Step]], dict[bytes, int]]:
        """The rows from ``front`` on that memory and lower tiers can give; where each missing record is."""
        rows: list[list[_Step]] = []
        places: dict[bytes, int] = {}
        search.asked = False
        # Most prefixes end for good where memory's ends: the first row is asked for alone.
        rest = range(search.front, search.length)
        for window in (rest[:1], rest[1:]):
            asked = self._plausible(search, window, self._lower.promotions.room - len(places))
            wanted = [step.record_key for row in asked for step in row if step.is_missing]
            places.update(zip(wanted, self._lower.chain.where(wanted), strict=True))
            for row in asked:
                answers = [places[step.record_key] for step in row if step.is_missing]
                if min(answers, default=0) < 0:
                    search.asked = NOWHERE not in answers
                    return rows, places
                rows.append(row)
            if len(asked) < len(window):
                break
        return rows, places

    def _plausible(self, search: _Search, positions: range, room: int) -> list[list[_Step]]:
        """Leading rows that are not ruled out here: too much being loaded already, or other content being
        loaded under the same hash."""
        rows: list[list[_Step]] = []
        for position in positions:
            row = self._row(search, position)
            missing = [step for step in row if step.is_missing]
            room -= len(missing)
            if room < 0 or any(step.is_blocked for step in row):
                break
            for step in missing:
                step.record_key = record_key("kv", self._layout, step.group, step.key.block_hash)
            rows.append(row)
        return rows

    def _keep_held(self, search: _Search, rows: Sequence[Sequence[_Step]]) -> None:
        for step in (step for row in rows for step in row):
            if step.block_id is not None:
                self._cpu[step.group].pin((step.block_id,))
                search.pinned[step.group].append(step.block_id)
            elif step.coming is not None:
                step.coming.waiting.append(search)
                search.num_waiting += 1

    def _reserve(self, rows: Sequence[Sequence[_Step]], tenant: str) -> list[_Step]:
        """Give missing blocks room, as far as there is any for the tenant in every group."""
        per_group: list[list[_Step]] = [[] for _ in self._cpu]
        for position, row in enumerate(rows):
            for step in row:
                step.position = position
                if step.is_missing:
                    per_group[step.group].append(step)
        end = len(rows)
        for tier, steps in zip(self._cpu, per_group, strict=True):
            ids = tier.reserve(len(steps), tenant)
            for step, block_id in zip(steps, ids, strict=False):
                step.reserved = block_id
            if len(ids) < len(steps):
                end = min(end, steps[len(ids)].position)
        kept = []
        for step in sorted((s for steps in per_group for s in steps), key=lambda s: s.position):
            if step.position < end:
                kept.append(step)
            elif step.reserved >= 0:
                self._cpu[step.group].discard((step.reserved,), late=False)
        return kept

    def _load(self, search: _Search, steps: Sequence[_Step], places: dict[bytes, int]) -> None:
        loads: list[tuple[int, Load]] = []
        for step in steps:
            coming = _Coming(step.key, step.reserved, search.tenant, [search])
            self._coming[step.group, step.key.block_hash] = coming
            search.num_waiting += 1
            into = self._arena.block(step.group, step.reserved)
            checker = _Checker(
                KvRecord.of(step.key), self._identity, self._layout, into, self._lower.check_payload
            )
            landed = self._landing(step.group, coming, checker)
            loads.append((places[step.record_key], Load(step.record_key, into, checker.check, landed)))
        for index, part in groupby(loads, key=lambda load: load[0]):
            self._lower.promotions.begin(index, [load for _, load in part])

    def _landing(self, group: int, coming: _Coming, checker: _Checker) -> Callable[[bool], None]:
        return lambda good: self._landed(group, coming, checker.checksums if good else None)

    def _landed(self, group: int, coming: _Coming, checksums: tuple[int, ...] | None) -> None:
        tier, key = self._cpu[group], coming.key
        del self._coming[group, key.block_hash]
        if checksums is None:
            tier.discard((coming.block_id,), late=False)
        else:
            tier.commit((Filled(coming.block_id, key, checksums, coming.tenant),))
            self._lower.demotions.known(_name(group, key))
        block_id = tier.find(key)
        for search in coming.waiting:
            search.num_waiting -= 1
            if block_id is not None and not search.over:
                tier.pin((block_id,))
                search.pinned[group].append(block_id)
            if not search.num_waiting and search.asked:
                self._advance(search)
            elif not search.num_waiting:
                self._finish(search)

    def _finish(self, search: _Search) -> None:
        """Answer with what is in memory now. Idempotent."""
        if search.over:
            return
        search.over = True
        self._answer(search.groups, self._leases.find(search.groups), search.done)
        for tier, ids in zip(self._cpu, search.pinned, strict=True):
            tier.unpin(ids)

    # Down.

    def _used(self, blocks: Sequence[tuple[int, BlockKey]]) -> None:
        demotions = self._lower.demotions
        again = demotions.used([_name(group, key) for group, key in blocks])
        due = self._with_leading([block for block, is_again in zip(blocks, again, strict=True) if is_again])
        demotions.write([_name(group, key) for group, key in due], lambda n: self._candidate(*due[n]))

    def _with_leading(self, blocks: Sequence[tuple[int, BlockKey]]) -> list[tuple[int, BlockKey]]:
        """These and the blocks that lead to them, which count as used as often: readers that keep the head of
        a prefix never ask for it, and below nothing is found without it. Groups side by side."""
        chains: list[dict[bytes, BlockKey]] = [{} for _ in self._cpu]
        for group, key in blocks:
            chain = chains[group]
            if key.parent not in chain:
                chain.update((leading.block_hash, leading) for leading in self._cpu[group].before(key))
            chain[key.block_hash] = key
        rows = zip_longest(*(chain.values() for chain in chains))
        return [(group, key) for row in rows for group, key in enumerate(row) if key is not None]

    def _candidate(self, group: int, key: BlockKey) -> Candidate:
        tier = self._cpu[group]
        block_id = tier.find(key)
        ids = () if block_id is None else (block_id,)
        checksums = () if block_id is None else tier.ref(block_id).checksums

        def make() -> StoreItem:
            if block_id is None:
                raise ValueError("the block is not held any more")
            payload = self._arena.block(group, block_id)
            record = Record(self._identity, self._layout, KvRecord.of(key), checksums, payload.nbytes)
            return StoreItem(record.key, encode_header(record), payload)

        return Candidate(make, lambda: tier.pin(ids), lambda: tier.unpin(ids))


class _Search:
    """One look-up that is not decided by memory alone. ``length``: rows that memory could hold together;
    ``front``: those that need no more to be begun."""

    def __init__(self, groups: Sequence[Sequence[BlockKey]], front: int, done: Answer, tenant: str) -> None:
        self.groups = groups
        self.length = min(map(_num_apart, groups))
        self.front = front
        self.done = done
        self.tenant = tenant
        self.pinned: Pinned = tuple([] for _ in groups)
        self.num_waiting = 0
        self.asked = False
        self.over = False


@dataclass(slots=True, eq=False)
class _Step:
    """One block that a look-up needs: held, coming, or missing (perhaps below)."""

    group: int
    key: BlockKey
    block_id: int | None
    coming: _Coming | None
    record_key: bytes = b""
    position: int = 0
    reserved: int = -1

    @property
    def is_missing(self) -> bool:
        return self.block_id is None and self.coming is None

    @property
    def is_blocked(self) -> bool:
        return self.block_id is None and self.coming is not None and self.coming.key != self.key


@dataclass(slots=True, eq=False)
class _Checker:
    """Verifies one record against what was asked for, over the block's own memory. ``checksums``: the
    producer's, once that was good."""

    content: KvRecord
    identity: IdentityKey
    layout: LayoutSpec
    payload: memoryview
    check_payload: PayloadCheck
    checksums: tuple[int, ...] = ()

    def check(self, header: bytes) -> None:
        """Raises CorruptRecord."""
        record = decode_header(header)
        verify(record, self.payload, self.content, self.identity, self.layout, self.check_payload)
        self.checksums = record.checksums


def _num_apart(keys: Sequence[BlockKey]) -> int:
    """Leading keys of which no two share a hash. Memory and lower tiers hold one block a hash: what follows
    would take the place of a block that goes before it, or be a second load of the same record."""
    seen: set[bytes] = set()
    for key in keys:
        if key.block_hash in seen:
            break
        seen.add(key.block_hash)
    return len(seen)


def _name(group: int, key: BlockKey) -> bytes:
    return key.block_hash if not group else b"%d " % group + key.block_hash
