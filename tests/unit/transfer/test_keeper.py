"""Arenas that outlive their owner: one owner at a time, also when it is frozen or killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.transfer.arena import HEADER_BYTES, Arena, parse_header, plan_region
from shared.transfer.keeper import Keeper, KeptClaim, NoKeeper
from shared.transfer.kept import KeptArena, open_kept
from shared.types.identity import IdentityKey, LayoutSpec
from shared.types.kv import KVGroupSpec

IDENTITY = IdentityKey("m", "r", "t", "uint64")
LAYOUT = LayoutSpec((KVGroupSpec(1, 1, 1, "uint64"),), 16)
ROOT = Path(__file__).parents[3]

#: Opens the arena, writes into a block, says so, and lives until it is killed.
OWNER = """
import sys, time
from tests.unit.transfer.test_keeper import opened
kept = opened(sys.argv[1], "b" * 32)
print("old" if kept.old else "new", bytes(kept.arena.block(0, 1)[:4]).decode("latin1"), flush=True)
kept.arena.block(0, 1)[:4] = b"mark"
kept.arena.set_epoch(5)
print("written", flush=True)
time.sleep(600)
"""


def opened(address: str, incarnation: str, layout: LayoutSpec = LAYOUT, blocks: int = 3) -> KeptArena:
    return open_kept(address, "decode-0", IDENTITY, layout, "kv", (blocks,), (256,), incarnation, 640)


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    keeper = Keeper()
    yield keeper
    keeper.close()
    keeper.close()


class Owner:
    """A process that owns the arena."""

    def __init__(self, keeper: Keeper) -> None:
        environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, keeper.address],
            cwd=ROOT,
            env=environ,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().strip()
        assert self.process.stdout.readline().strip() == "written"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def until_free(keeper: Keeper) -> KeptArena:
    """The kernel ends a dead owner's connection; the keeper hears of it a moment later."""
    for _ in range(200):
        kept = opened(keeper.address, "c" * 32)
        if kept.old:
            return kept
        kept.close()
        kept.arena.close()
    raise AssertionError("the arena never came free")


def test_a_killed_owners_arena_is_there_for_the_next_with_new_names_in_it(keeper: Keeper) -> None:
    owner = Owner(keeper)
    assert owner.said == "new \0\0\0\0".strip()
    owner.kill()
    kept = until_free(keeper)
    header = parse_header(kept.arena.buffer[:HEADER_BYTES])
    assert bytes(kept.arena.block(0, 1)[:4]) == b"mark"
    assert (header.incarnation, header.epoch) == ("c" * 32, 5)
    kept.close()
    kept.arena.close()


def test_a_frozen_owner_still_owns_its_arena(keeper: Keeper) -> None:
    owner = Owner(keeper)
    os.kill(owner.process.pid, signal.SIGSTOP)
    with pytest.raises(NoKeeper, match="lives"):
        KeptClaim(keeper.address, "decode-0/kv", b"any")
    beside = opened(keeper.address, "d" * 32)
    assert not beside.old and bytes(beside.arena.block(0, 1)[:4]) == bytes(4)
    beside.close()
    beside.arena.close()
    owner.kill()
    kept = until_free(keeper)
    assert bytes(kept.arena.block(0, 1)[:4]) == b"mark", "what was made beside it was not kept"
    kept.close()
    kept.arena.close()


def test_another_geometry_finds_nothing_and_takes_the_place(keeper: Keeper) -> None:
    for layout, blocks, old in (
        (LAYOUT, 3, False),
        (LAYOUT, 3, True),
        (LayoutSpec(LAYOUT.groups, 32), 3, False),
        (LAYOUT, 3, False),
        (LAYOUT, 4, False),
        (LAYOUT, 4, True),
    ):
        for _ in range(200):
            try:
                KeptClaim(keeper.address, "decode-0/kv", b"other").close()
            except NoKeeper:
                continue
            break
        kept = opened(keeper.address, "e" * 32, layout, blocks)
        assert kept.old is old, (layout, blocks)
        kept.close()
        kept.arena.close()


def test_without_a_keeper_the_arena_ends_with_its_owner() -> None:
    kept = opened("triptych-keeper-nobody", "e" * 32)
    assert not kept.old
    kept.close()
    kept.arena.close()


def test_nobody_else_can_write_into_or_resize_a_kept_arena(keeper: Keeper) -> None:
    kept = opened(keeper.address, "e" * 32)
    assert os.fstat(kept.arena.fd).st_mode & 0o777 == 0o400
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(kept.arena.fd, 0)
    kept.close()
    kept.arena.close()


def test_a_file_that_is_no_such_arena_is_not_adopted() -> None:
    plan = plan_region("kv", (3,), (256,), 640)
    with Arena.create("kv", (3,), (256,), "a" * 32) as unkept, pytest.raises(ConfigError):
        Arena.adopt(os.dup(unkept.fd), plan, "b" * 32)
    with Arena.create("kv", (3,), (256,), "a" * 32, ledger_bytes=640) as damaged:
        damaged.buffer[0] ^= 1
        with pytest.raises(ConfigError):
            Arena.adopt(os.dup(damaged.fd), plan, "b" * 32)


def test_the_ledger_lies_behind_the_blocks() -> None:
    with Arena.create("kv", (3, 2), (256, 5000), "a" * 32, ledger_bytes=640) as arena:
        before = bytes(arena.data(1))
        arena.ledger()[:] = b"\xff" * arena.ledger().nbytes
        assert arena.ledger().nbytes >= 640 and bytes(arena.data(1)) == before
    with Arena.create("kv", (3,), (256,), "a" * 32) as plain:
        assert plain.ledger().nbytes == 0
