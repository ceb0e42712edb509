"""The disk tier when files are damaged, media fail, and processes are killed in mid-write."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.clock import ManualClock
from shared.errors import ConfigError
from shared.tiering import disk_files
from tests.contract.tiering.harness import UNALIGNED, Stored, make, make_all
from tests.unit.tiering.disk_setting import (
    RECORD_BYTES,
    Disk,
    directory_bytes,
    file_of,
    quarantined,
    record_files,
)

POINTS = ("before_write", "after_write", "before_fsync", "before_rename", "after_rename")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "tier"


def filled(directory: Path, num_records: int) -> list[Stored]:
    """A closed tier of records."""
    disk = Disk(directory)
    records = make_all(range(num_records))
    disk.store(records)
    disk.check()
    return records


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


class TestDamage:
    def test_a_flipped_payload_is_a_miss_put_aside_and_counted(self, directory: Path) -> None:
        records = filled(directory, 3)
        flip(file_of(directory, records[1]), -1)
        disk = Disk(directory)
        assert disk.present(records) == [0, 1, 2]  # headers are read at start, payloads when they are loaded
        assert disk.good(records) == {records[0].key, records[2].key}
        assert disk.present(records) == [0, 2]
        assert disk.driver.corrupt == {records[1].key}
        assert disk.seen.events["quarantined", "payload"] == 1
        assert disk.store(records) == {record.key for record in records}
        assert disk.good(records) == {record.key for record in records}
        disk.check()
        assert quarantined(directory) == [f"00000001-payload-{records[1].key.hex()}"]

    def damage(self, directory: Path, how: str, one: Path, other: Path) -> None:
        if how == "magic":
            flip(one, 0)
        elif how == "version":
            data = bytearray(one.read_bytes())
            data[8] = 2
            one.write_bytes(data)
        elif how == "checksum":
            flip(one, 70)
        elif how == "length":
            os.truncate(one, one.stat().st_size - 1)
        elif how == "key":
            shutil.copy(other, one)
        else:
            one.unlink()
            one.symlink_to(other) if how == "symlink" else os.mkfifo(one)

    @pytest.mark.parametrize(
        ("how", "serving"),
        [(how, at) for how in ("magic", "version", "checksum", "length", "key", "symlink") for at in (0, 1)]
        + [("fifo", 0)],
    )
    def test_every_other_damage(self, directory: Path, how: str, serving: int) -> None:
        """Found at start, and found by a load when it came after."""
        records = filled(directory, 2)
        paths = [file_of(directory, record) for record in records]
        disk = Disk(directory) if serving else None
        self.damage(directory, how, *paths)
        disk = disk or Disk(directory)
        assert disk.good(records) == {records[1].key}
        reasons = {"symlink": "io" if serving else "key", "fifo": "key"}
        assert disk.seen.events["quarantined", reasons.get(how, how)] == 1
        disk.check()
        assert len(quarantined(directory)) == 1

    def test_a_vanished_file_is_a_miss_whose_room_is_back(self, directory: Path) -> None:
        records = filled(directory, 2)
        disk = Disk(directory)
        file_of(directory, records[0]).unlink()
        assert disk.good(records) == {records[1].key}
        assert disk.seen.events["evicted", "missing"] == 1
        disk.check()

    def test_foreign_names_and_half_written_files(self, directory: Path) -> None:
        records = filled(directory, 1)
        (directory / "ab" / "something").write_bytes(bytes(10))
        shutil.copy(file_of(directory, records[0]), directory / "cd" / records[0].key.hex())
        (directory / "tmp" / "half").write_bytes(bytes(9000))
        disk = Disk(directory)
        assert disk.seen.events["quarantined", "key"] == disk.seen.events["quarantined", "length"] == 1
        assert disk.good(records) == {records[0].key}
        disk.check()

    def test_quarantine_is_bounded(self, directory: Path) -> None:
        records = filled(directory, 30)
        for record in records:
            flip(file_of(directory, record), -1)
        disk = Disk(directory, max_quarantined=5)
        assert disk.good(records) == set()
        disk.check()
        assert [name[:8] for name in quarantined(directory)] == [f"{n:08d}" for n in range(26, 31)]
        filled(directory.with_name("other"), 8)
        small = Disk(directory.with_name("other"), 8)
        for record in records[:8]:
            flip(file_of(small.directory, record), -1)
        assert small.good(records[:8]) == set()
        small.check()
        assert len(quarantined(small.directory)) == 2  # a quarter of the room

    def test_a_storm_of_mutated_files_yields_no_wrong_byte(self, directory: Path) -> None:
        """Flips, cuts, swaps and growth; each is counted once, and what is loaded is what was stored
        (``good`` raises otherwise)."""
        records = filled(directory, 96)
        disk = Disk(directory, 200)
        state = 7
        for n, record in enumerate(records):
            state = state * 6364136223846793005 + 1442695040888963407 & (1 << 64) - 1
            path, how, at = file_of(directory, record), n % 4, (state >> 33) % RECORD_BYTES
            if how == 0:
                flip(path, at)
            elif how == 1:
                os.truncate(path, at)
            elif how == 2:
                shutil.copy(file_of(directory, records[n - 1]), path)
            else:
                path.write_bytes(path.read_bytes() + b"x")
        assert disk.good(records) == set()
        disk.tier._writers.drain()
        assert sum(n for event, n in disk.seen.events.items() if event[0] == "quarantined") == 96
        assert disk.store(records) == {record.key for record in records}
        assert disk.good(records) == {record.key for record in records}
        disk.check()


def failed(error: int) -> None:
    raise OSError(error, os.strerror(error))


def failing(monkeypatch: pytest.MonkeyPatch, error: int) -> Callable[[], None]:
    """Every write fails with ``error`` until the returned function is called."""
    monkeypatch.setattr(disk_files, "_write_all", lambda fd, buffers: failed(error))
    return monkeypatch.undo


class TestMedium:
    @pytest.mark.parametrize("error", ["ENOSPC", "EIO", "EROFS", "EDQUOT"])
    def test_writes_go_off_reads_go_on_and_writes_come_back(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch, error: str
    ) -> None:
        clock = ManualClock()
        disk = Disk(directory, clock=clock)
        old, new = make_all(range(2)), make_all(range(10, 14))
        disk.store(old)
        heal = failing(monkeypatch, getattr(errno, error))
        assert disk.store(new) == set()
        assert not disk.tier.writable and disk.seen.events["disabled"] == 1
        assert disk.seen.events["write_failed", error] == 4
        assert disk.good(old) == {record.key for record in old}
        assert disk.store([*old, *new]) == {record.key for record in old}
        assert disk.seen.events["write_failed", error] == 4  # not even tried
        heal()
        assert disk.store(new) == set()
        clock.advance(1.0)
        assert disk.tier.writable
        assert disk.store(new) == {new[0].key}  # one trial
        assert disk.store(new) == {record.key for record in new}
        disk.check()

    def test_nothing_is_evicted_for_what_may_not_be_written(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        disk = Disk(directory, 4.7)
        disk.store(make_all(range(4)))
        failing(monkeypatch, errno.EROFS)
        assert disk.store([make(10, UNALIGNED)]) == set()  # a small one, for which there is room
        assert disk.store(make_all(range(11, 15))) == set()
        assert disk.present(make_all(range(4))) == [0, 1, 2, 3]
        disk.check()

    def test_the_pause_doubles_up_to_a_minute(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = ManualClock()
        disk = Disk(directory, clock=clock)
        failing(monkeypatch, errno.ENOSPC)
        disk.store([make(0)])
        pauses = []
        for _ in range(8):
            pause = 0.0
            while not disk.tier.writable:
                clock.advance(0.5)
                pause += 0.5
            pauses.append(pause)
            disk.store(make_all(range(3)))
        assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
        assert disk.seen.events["write_failed", "ENOSPC"] == 9 and disk.seen.events["disabled"] == 1
        disk.check()

    def test_a_failed_folder_sync_is_the_mediums_fault(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        disk = Disk(directory)
        monkeypatch.setattr(disk.tier._files, "sync_folders", lambda folders: failed(errno.EIO))
        assert disk.store([make(0)]) == {make(0).key}
        assert not disk.tier.writable
        assert disk.good([make(0)]) == {make(0).key}
        disk.check()

    def test_files_that_cannot_be_removed_still_count(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """When removal works again they go, and their room is back."""
        disk = Disk(directory, 5)
        records = make_all(range(4))
        disk.store(records)
        with monkeypatch.context() as patched:
            patched.setattr(disk.tier._files, "unlink", lambda path: False)
            disk.tier.remove([records[3].key])
            disk.tier._writers.drain()
            assert disk.present(records) == [0, 1, 2]
            assert disk.tier.num_bytes == directory_bytes(directory) == 4 * RECORD_BYTES
            assert disk.store([records[3]]) == {records[3].key}  # in the place of what was left of it
            assert disk.tier.num_bytes == directory_bytes(directory) == 4 * RECORD_BYTES
            assert disk.store(make_all(range(10, 13))) == {make(10).key}  # then victims stay: no room
            assert disk.tier.num_bytes == directory_bytes(directory) == 5 * RECORD_BYTES
        assert disk.present(records) == [0, 3]
        disk.tier.reconcile()
        disk.tier._writers.drain()
        disk.driver.collect()
        disk.tier._writers.drain()
        assert disk.tier.num_bytes == 3 * RECORD_BYTES
        assert disk.seen.errors == [0]
        assert disk.store(make_all(range(20, 22))) == {make(20).key, make(21).key}
        disk.check()

    def test_what_a_failed_write_left_counts(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        disk = Disk(directory, 5)
        with monkeypatch.context() as patched:
            patched.setattr(disk.tier._files, "unlink", lambda path: False)
            patched.setattr(os, "fsync", lambda fd: failed(errno.EIO))
            assert disk.store([make(0)]) == set()
        assert disk.tier.num_bytes == directory_bytes(directory) == RECORD_BYTES
        disk.tier.reconcile()
        disk.check()
        assert disk.tier.num_bytes == 0 and disk.seen.errors == [0]

    def test_a_part_that_was_written_goes_with_its_failure(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        disk = Disk(directory, clock=ManualClock())
        real = os.pwritev

        def full(fd: int, buffers: list[memoryview], offset: int) -> int:
            if offset:
                raise OSError(errno.ENOSPC, "")
            return real(fd, buffers[:1], offset)

        with monkeypatch.context() as patched:
            patched.setattr(os, "pwritev", full)
            assert disk.store([make(0)]) == set()
        assert disk.seen.events["write_failed", "ENOSPC"] == 1
        assert disk.tier.num_bytes == directory_bytes(directory) == 0
        disk.check()

    @pytest.mark.parametrize("direct", [True, False])
    def test_short_writes_and_reads_are_continued(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
    ) -> None:
        disk = Disk(directory)
        disk.tier._files.direct &= direct
        write, read = os.pwritev, os.preadv
        monkeypatch.setattr(os, "pwritev", lambda fd, buffers, at: write(fd, [buffers[0][:4096]], at))
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: read(fd, [buffers[0][:4096]], at))
        records = [*make_all(range(2)), make(0, UNALIGNED)]
        assert disk.store(records) == {record.key for record in records}
        assert disk.good(records) == {record.key for record in records}
        disk.check()

    def test_a_disk_that_is_really_full(self, directory: Path) -> None:
        """In a file system of its own, where the system lets us make one."""
        command = [
            "unshare",
            "-rm",
            "sh",
            "-c",
            'mount -t tmpfs -o size=300k none "$1" && shift && exec "$@"',
            "sh",
        ]
        directory.mkdir()
        probe = subprocess.run([*command, str(directory), "true"], capture_output=True)
        if probe.returncode:
            pytest.skip("no private mounts here")
        child = [sys.executable, "-m", "tests.unit.tiering.disk_child", "fill", str(directory / "tier")]
        done = subprocess.run([*command, str(directory), *child], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        held, tried, off = map(int, done.stdout.split())
        assert 0 < held < tried and off == 1


class TestCrash:
    @pytest.mark.parametrize("point", POINTS)
    def test_a_fault_at_any_step_leaves_nothing(self, directory: Path, point: str) -> None:
        disk = Disk(directory, failpoints=f"tier.{point}=raise:3", num_writers=1)
        records = make_all(range(5))
        assert disk.store(records) == {records[n].key for n in (0, 1, 3, 4)}
        assert disk.tier.writable
        assert disk.store(records) == {record.key for record in records}
        disk.check()

    @pytest.mark.parametrize("point", POINTS)
    @pytest.mark.parametrize("hit", [1, 14])
    def test_a_kill_at_any_step_loses_only_what_was_not_acknowledged(
        self, directory: Path, point: str, hit: int
    ) -> None:
        """The child stores 5 records a job in a tier of 8, so that kills also meet evictions."""
        command = [sys.executable, "-m", "tests.unit.tiering.disk_child", "kill", str(directory)]
        child = subprocess.run([*command, f"tier.{point}=kill:{hit}"], capture_output=True, text=True)
        assert child.returncode == -signal.SIGKILL, child.stderr
        acknowledged = int(child.stdout.splitlines()[-1]) if child.stdout else 0
        assert acknowledged == 5 * ((hit - 1) // 5)
        # At the 14th write: job 2 has taken two of job 1's, job 3 the rest of those and two of job 2's.
        expected = [5, 6, 7, 10, 11, 12] if hit == 14 else []
        expected += [hit - 1] if point == "after_rename" else []
        disk = Disk(directory, 8)
        everything = make_all(range(20))
        assert disk.present(everything) == expected
        assert len(record_files(directory)) == len(expected)
        assert disk.good(everything) == {everything[n].key for n in expected}
        assert not [event for event in disk.seen.events if event[0] == "quarantined"]
        assert disk.store(everything[:4]) == {record.key for record in everything[:4]}
        disk.check()

    def test_the_lock_goes_with_its_process(self, directory: Path) -> None:
        command = [sys.executable, "-m", "tests.unit.tiering.disk_child", "hold", str(directory)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            with pytest.raises(ConfigError, match="another process"):
                Disk(directory)
            child.kill()
            child.wait()
        disk = Disk(directory)
        assert disk.good([make(0)]) == {make(0).key}
        disk.check()
