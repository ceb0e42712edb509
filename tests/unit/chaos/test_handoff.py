"""The proofs' own arithmetic: whose death counts for what, which bytes are a read of blocks, what is said."""

from __future__ import annotations

import random
import signal
from types import SimpleNamespace
from typing import Any, cast

from services.cli.topology import ProcessSpec
from shared.failpoints import NAMES, Failpoints
from shared.transfer.tcp_server import FRAME, NOTIFY, READ
from tests.chaos.cluster import Cluster, Death
from tests.chaos.handoff import line_of
from tests.chaos.handoff_base import FAST, LONG, Proof, again, long_case
from tests.chaos.handoff_freeze import _reads_blocks
from tests.chaos.handoff_kills import POINTS, _arms, _Hangman
from tests.chaos.workload import plain_case


class ClusterDouble:
    """Remembers what next lives are armed with."""

    def __init__(self, *names: str) -> None:
        self.specs = [SimpleNamespace(name=name) for name in names]
        self.deaths: list[Death] = []
        self.files: list[tuple[str, str]] = []

    async def until_whole(self) -> None:
        """All are there."""

    def arm_next_life(self, spec: ProcessSpec, failpoints: str) -> None:
        self.files.append((spec.name, failpoints))

    def dies(self, name: str, code: int = -signal.SIGKILL) -> None:
        self.deaths.append(Death(name, code, 0.0))


def hangman(cluster: ClusterDouble, *arms: str) -> _Hangman:
    first, *rest = arms
    return _Hangman(cast(Cluster, cast(Any, cluster)), {"a": first}, {"a": rest})


async def test_each_life_dies_of_its_own_arm() -> None:
    cluster = ClusterDouble("a")
    judge = hangman(cluster, "tier.before_write=kill:1", "tier.after_write=kill:2", "tier.after_write=kill:2")
    await judge.arm()
    await judge.arm()
    assert cluster.files == [("a", "tier.after_write=kill:2")], "once a life"
    cluster.dies("a")
    await judge.arm()
    cluster.dies("a")
    await judge.arm()
    assert not judge.is_through
    cluster.dies("a")
    await judge.arm()
    assert judge.is_through
    assert judge.kills == {("a", "tier.before_write"): 1, ("a", "tier.after_write"): 2}
    assert [arm for _, arm in cluster.files] == ["tier.after_write=kill:2"] * 2 + [""] * 2
    assert judge.others == []


async def test_a_life_that_ends_before_the_next_was_armed_dies_of_the_same_again() -> None:
    cluster = ClusterDouble("a")
    judge = hangman(cluster, "prefill.commit=kill:1", "free.before_release=kill:1")
    await judge.arm()
    for _ in range(3):
        cluster.dies("a")
    judge.bury()
    assert judge.kills == {("a", "prefill.commit"): 1, ("a", "free.before_release"): 2}


async def test_other_deaths_are_not_ours() -> None:
    cluster = ClusterDouble("a", "b")
    judge = hangman(cluster, "prefill.commit=kill:1")
    cluster.dies("b")
    cluster.dies("a", -signal.SIGSEGV)
    judge.bury()
    assert judge.kills == {}
    assert judge.others == ["b died of -9", "a died of -11"]


def test_every_named_point_kills_somebody_as_often_as_the_lane_says() -> None:
    arms = [arm for points in POINTS.values() for arm in _arms(points, LONG, random.Random(1))]
    names = [arm.partition("=")[0] for arm in arms]
    assert set(names) == NAMES
    assert all(names.count(name) % LONG.kills == 0 for name in NAMES)
    for arm in arms:
        Failpoints.parse(arm)


def frame(kind: int, offset: int) -> bytes:
    return FRAME.pack(kind, 0, 0, 1, 7) + offset.to_bytes(8, "little") + (64).to_bytes(8, "little")


def test_a_read_of_blocks_is_told_from_a_fence() -> None:
    assert _reads_blocks(frame(READ, 8192))
    assert not _reads_blocks(frame(READ, 0))
    assert not _reads_blocks(frame(NOTIFY, 8192))
    assert not _reads_blocks(frame(READ, 8192)[:10])


def test_a_line_says_what_became_of_a_proof() -> None:
    assert line_of(Proof("disk", True, "0 failed"), 5) == "disk  seed 5  0 failed  PASS"
    assert line_of(Proof("disk", False, "1 failed"), 5).endswith("FAIL")
    control = Proof("disk", True, "12 wrong", control=True)
    assert line_of(control, 5).endswith("PASS (it fails, as it must)")


def test_prompts_are_as_long_as_they_should_be_and_alike_in_nothing() -> None:
    one, other = long_case(1, 1, 300), long_case(1, 2, 300)
    assert len(one.prompt) == len(other.prompt) == 300
    assert one.prompt[:9] != other.prompt[:9]
    assert one.body["prompt"].encode() == bytes(one.prompt)
    assert again(one, 9).number == 9 and again(one, 9).prompt == one.prompt
    assert plain_case(1, 1).prompt != one.prompt
    assert FAST.back_s == 3.0
