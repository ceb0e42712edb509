"""Failpoints fire once, at the count asked for, and are inert otherwise."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from shared.failpoints import NAMES, FailpointError, Failpoints


def test_unarmed_failpoints_do_nothing() -> None:
    points = Failpoints()
    for name in NAMES:
        points.hit(name)
        assert not points.armed(name, "flip")


def test_raise_fires_at_its_count_only() -> None:
    points = Failpoints.parse("xfer.after_k=raise:3")
    points.hit("xfer.after_k")
    points.hit("xfer.after_k")
    points.hit("decode.after_emit")
    with pytest.raises(FailpointError, match=r"xfer\.after_k"):
        points.hit("xfer.after_k")
    points.hit("xfer.after_k")


def test_flip_fires_only_where_it_is_asked_for() -> None:
    points = Failpoints.parse("commit.after_checksum=flip")
    points.hit("commit.after_checksum")
    assert points.armed("commit.after_checksum", "flip")
    assert not points.armed("commit.after_checksum", "flip")


def test_several_points_count_for_themselves() -> None:
    points = Failpoints.parse(" prefill.commit=raise , free.before_release=raise:2 ,")
    points.hit("free.before_release")
    with pytest.raises(FailpointError):
        points.hit("prefill.commit")
    with pytest.raises(FailpointError):
        points.hit("free.before_release")


@pytest.mark.parametrize(
    "text", ["nowhere=kill", "xfer.after_k=explode", "xfer.after_k", "=kill", "xfer.after_k=kill:x"]
)
def test_unknown_names_and_actions_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Failpoints.parse(text)


def test_kill_is_sigkill() -> None:
    name = "store.before_publish"
    code = f"from shared.failpoints import Failpoints; Failpoints.parse('{name}=kill').hit('{name}')"
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
