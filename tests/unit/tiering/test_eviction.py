"""Eviction policies beside plain models of themselves, and what they are for: scans, prefixes, pins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.tiering.eviction import POLICIES, EvictionPolicy, SecondUse, make_policy

CAPACITY = 6
KEYS = range(14)


# Plain models: lists, oldest first. One method a policy's rule; no bounds but those of the papers.


class PlainLRU:
    def __init__(self) -> None:
        self.keys: list[int] = []

    def held(self) -> list[int]:
        return list(self.keys)

    def store(self, key: int) -> None:
        self.remove(key)
        self.keys.append(key)

    def touch(self, key: int) -> None:
        if key in self.keys:
            self.store(key)

    def remove(self, key: int) -> None:
        self.keys = [k for k in self.keys if k != key]

    def evict(self, pinned: set[int]) -> int | None:
        for key in self.held():
            self.keys.remove(key)
            if key not in pinned:
                return key
            self.keys.append(key)
        return None


class PlainARC:
    def __init__(self) -> None:
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []
        self.p = 0.0

    def held(self) -> list[int]:
        return self.t1 + self.t2

    def store(self, key: int) -> None:
        if key in self.held():
            self.touch(key)
        elif key in self.b1:
            self.p = min(CAPACITY, self.p + max(1, len(self.b2) / len(self.b1)))
            self.b1.remove(key)
            self.t2.append(key)
        elif key in self.b2:
            self.p = max(0, self.p - max(1, len(self.b1) / len(self.b2)))
            self.b2.remove(key)
            self.t2.append(key)
        else:
            self.t1.append(key)
        self._bound()

    def touch(self, key: int) -> None:
        for queue in (self.t1, self.t2):
            if key in queue:
                queue.remove(key)
                self.t2.append(key)
                return

    def remove(self, key: int) -> None:
        for queue in (self.t1, self.t2, self.b1, self.b2):
            if key in queue:
                queue.remove(key)

    def evict(self, pinned: set[int]) -> int | None:
        both = [(self.t1, self.b1), (self.t2, self.b2)]
        for queue, ghosts in both if len(self.t1) > self.p else both[::-1]:
            for key in list(queue):
                queue.remove(key)
                if key not in pinned:
                    ghosts.append(key)
                    self._bound()
                    return key
                queue.append(key)
        return None

    def _bound(self) -> None:
        while self.b1 and len(self.t1) + len(self.b1) > CAPACITY:
            self.b1.pop(0)
        while self.b2 and len(self.held()) + len(self.b1) + len(self.b2) > 2 * CAPACITY:
            self.b2.pop(0)


class PlainS3FIFO:
    SMALL = 1  # a tenth of CAPACITY, but at least one

    def __init__(self) -> None:
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghosts: list[int] = []
        self.uses: dict[int, int] = {}

    def held(self) -> list[int]:
        return self.small + self.main

    def store(self, key: int) -> None:
        if key in self.held():
            self.touch(key)
        else:
            (self.main if key in self.ghosts else self.small).append(key)
            self.ghosts = [k for k in self.ghosts if k != key]
            self.uses[key] = 0

    def touch(self, key: int) -> None:
        if key in self.held():
            self.uses[key] = min(3, self.uses[key] + 1)

    def remove(self, key: int) -> None:
        for queue in (self.small, self.main, self.ghosts):
            if key in queue:
                queue.remove(key)

    def evict(self, pinned: set[int]) -> int | None:
        while set(self.held()) - pinned or any(self.uses[k] for k in self.main):
            free_small = [k for k in self.small if k not in pinned or self.uses[k] > 1]
            free_main = [k for k in self.main if k not in pinned or self.uses[k]]
            from_small = len(self.small) >= self.SMALL or not self.main
            if (free_small if from_small else not free_main) and free_small:
                key = self.small.pop(0)
                if self.uses[key] > 1:
                    self.main.append(key)
                    self.uses[key] = 0
                elif key in pinned:
                    self.small.append(key)
                else:
                    self.ghosts = [*self.ghosts, key][-(CAPACITY - self.SMALL) :]
                    return key
            else:
                key = self.main.pop(0)
                if self.uses[key] or key in pinned:
                    self.uses[key] = max(0, self.uses[key] - 1)
                    self.main.append(key)
                else:
                    return key
        return None


PLAIN: dict[str, Callable[[], Any]] = {"lru": PlainLRU, "arc": PlainARC, "s3fifo": PlainS3FIFO}
STEPS = st.lists(
    st.tuples(
        st.sampled_from("ssstttre"), st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True)
    ),
    max_size=60,
)


def evict_one(policy: EvictionPolicy[int], pinned: set[int] = frozenset()) -> int | None:  # type: ignore[assignment]
    return next(policy.victims(lambda key: key not in pinned), None)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=150, deadline=None)
@given(steps=STEPS)
def test_equal_to_a_plain_model(name: str, steps: list[tuple[str, list[int]]]) -> None:
    policy, plain = make_policy(name, CAPACITY), PLAIN[name]()
    for action, keys in steps:
        if action == "s":
            while len(policy) >= CAPACITY:
                assert evict_one(policy) == plain.evict(set())
            policy.stored(keys)
            for key in reversed(keys):
                plain.store(key)
        elif action == "t":
            policy.touched(keys)
            for key in reversed(keys):
                plain.touch(key)
        elif action == "r":
            policy.removed(keys[0])
            plain.remove(keys[0])
        elif name != "s3fifo":
            assert evict_one(policy, set(keys)) == plain.evict(set(keys))
        else:
            assert evict_one(policy) == plain.evict(set())
        assert len(policy) == len(plain.held())
    assert list(policy.victims(lambda key: True)) == list(iter(lambda: plain.evict(set()), None))


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=100, deadline=None)
@given(steps=STEPS, pinned=st.sets(st.sampled_from(KEYS)))
def test_every_key_once_and_a_pinned_one_never(
    name: str, steps: list[tuple[str, list[int]]], pinned: set[int]
) -> None:
    policy: EvictionPolicy[int] = make_policy(name, CAPACITY)
    held: set[int] = set()
    for action, keys in steps:
        if action == "s":
            policy.stored(keys)
            held.update(keys)
        elif action == "t":
            policy.touched(keys)
        elif action == "r":
            policy.removed(keys[0])
            held.discard(keys[0])
        else:
            key = evict_one(policy, pinned)
            assert (key is None) == (held <= pinned)
            held.discard(key)  # type: ignore[arg-type]
        assert len(policy) == len(held)
    victims = list(policy.victims(lambda key: key not in pinned))
    assert sorted(victims) == sorted(held - pinned)
    assert sorted(policy.victims(lambda key: True)) == sorted(held & pinned)
    assert len(policy) == 0


def serve(policy: EvictionPolicy[Any], capacity: int, trace: Sequence[Any]) -> dict[Any, int]:
    """Hits by key of a tier that stores every miss."""
    held: set[Any] = set()
    hits: dict[Any, int] = {}
    for key in trace:
        if key in held:
            policy.touched((key,))
            hits[key] = hits.get(key, 0) + 1
            continue
        if len(held) >= capacity:
            held.discard(next(policy.victims(lambda key: True)))
        policy.stored((key,))
        held.add(key)
    return hits


def scan_trace() -> list[Any]:
    """20 keys in use, and after every round of them a scan of 90 keys that never come back."""
    trace: list[Any] = [("hot", n) for n in range(20)] * 4
    for scan in range(30):
        trace += [("scan", scan, n) for n in range(90)]
        trace += [("hot", n) for n in range(20)]
    return trace


@pytest.mark.parametrize("name", ["arc", "s3fifo"])
def test_a_scan_does_not_flush_what_is_in_use(name: str) -> None:
    hits = serve(make_policy(name, 50), 50, scan_trace())
    assert sum(hits.values()) >= 0.9 * (30 * 20 + 60)
    assert sum(serve(make_policy("lru", 50), 50, scan_trace()).values()) == 60


@pytest.mark.parametrize("name", POLICIES)
def test_a_prefix_is_eaten_from_its_tail(name: str) -> None:
    policy: EvictionPolicy[int] = make_policy(name, 100)
    policy.stored([0, 1, 2, 3])
    policy.stored([10, 11, 12])
    assert [next(policy.victims(lambda key: True)) for _ in range(7)] == [3, 2, 1, 0, 12, 11, 10]


@pytest.mark.parametrize("name", ["lru", "arc"])
def test_a_prefix_that_was_used_goes_later_and_still_from_its_tail(name: str) -> None:
    policy: EvictionPolicy[int] = make_policy(name, 100)
    policy.stored([0, 1, 2, 3])
    policy.stored([10, 11, 12])
    policy.touched([0, 1, 2])
    assert list(policy.victims(lambda key: True)) == [3, 12, 11, 10, 2, 1, 0]


def test_arc_leans_towards_what_its_ghosts_ask_for() -> None:
    """Megiddo and Modha: a hit among the ghosts of once-seen keys gives those more room, and back."""
    policy: EvictionPolicy[int] = make_policy("arc", 4)
    policy.stored([1])
    policy.touched([1])
    policy.stored([2])
    policy.stored([3])
    assert evict_one(policy) == 2  # two recent keys against a target of nought
    policy.stored([2])  # a recent ghost: the target grows to one, and 2 is frequent now
    assert evict_one(policy) == 1  # one recent key is as many as wanted: the frequent list gives
    policy.stored([1])  # a frequent ghost: the target falls back
    assert evict_one(policy) == 3


def test_s3fifo_keeps_what_was_used_twice_on_its_way() -> None:
    policy: EvictionPolicy[int] = make_policy("s3fifo", 20)
    policy.stored([1])
    policy.stored([2])
    policy.touched([1])
    policy.touched([2])
    policy.touched([2])
    policy.stored([3])
    policy.stored([4])
    assert [evict_one(policy), evict_one(policy)] == [1, 3]  # 2 went on to the main queue
    policy.stored([1])  # remembered: to the main queue at once
    policy.stored([5])
    assert list(policy.victims(lambda key: True)) == [4, 2, 1, 5]


@pytest.mark.parametrize("name", POLICIES)
def test_ghosts_are_bounded(name: str) -> None:
    policy = make_policy(name, 10)
    serve(policy, 10, [*range(5000), *(n % 37 for n in range(5000))])
    queues = [value for value in vars(policy).values() if hasattr(value, "__len__")]
    assert sum(map(len, queues)) <= 20


@pytest.mark.parametrize("name", POLICIES)
def test_work_a_victim_does_not_grow_with_the_number_of_keys(name: str) -> None:
    """Counted in looks, not in seconds: the keys that a search meets, over a trace with hits and pins."""
    for size in (100, 1000):
        policy, looks = make_policy(name, size), 0

        def can_evict(key: int, size: int = size) -> bool:
            nonlocal looks
            looks += 1
            return key % size != 7  # one key in use

        for n in range(10 * size):
            if len(policy) >= size:
                next(policy.victims(can_evict))
            policy.stored((n,))
            policy.touched((n - 3,))
        assert looks <= 2 * 10 * size


def test_unknown_names_are_a_config_error() -> None:
    with pytest.raises(ConfigError, match="arc, lru, s3fifo"):
        make_policy("clock", 5)
    with pytest.raises(ValueError):
        POLICIES["lru"](0)


class TestSecondUse:
    def test_the_second_use_is_let_in(self) -> None:
        door: SecondUse[int] = SecondUse(10)
        assert door.admits([1, 2]) == [False, False]
        assert door.admits([2, 3, 2]) == [True, False, True]

    def test_what_was_seen_long_ago_is_forgotten(self) -> None:
        door: SecondUse[int] = SecondUse(3)
        door.admits([1, 2, 3])
        door.admits([1])
        door.admits([4, 5])
        assert len(door) == 3
        assert door.admits([1, 2]) == [True, False]
        with pytest.raises(ValueError):
            SecondUse(0)
