"""The disk tier at work: what it keeps, in which order it forgets, and what it finds again."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.clock import ManualClock
from shared.errors import ConfigError
from shared.failpoints import Failpoints
from shared.tiering.disk import DiskTier
from shared.tiering.eviction import POLICIES, make_policy
from shared.tiering.offload import LoadItem, Presence
from tests.contract.tiering.harness import UNALIGNED, aligned, make, make_all
from tests.unit.tiering.disk_setting import (
    RECORD_BYTES,
    Disk,
    directory_bytes,
    file_of,
    quarantined,
    record_files,
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def disk(directory: Path) -> Iterator[Disk]:
    made = Disk(directory)
    yield made
    made.check()


def test_files_belong_to_their_owner_alone(disk: Disk, directory: Path) -> None:
    disk.store(make_all(range(3)))
    for path in (directory, *directory.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert [path.name for path in record_files(directory)] == sorted(r.key.hex() for r in make_all(range(3)))
    assert disk.tier.num_bytes == 3 * RECORD_BYTES


def test_the_file_is_the_header_and_the_payload(disk: Disk, directory: Path) -> None:
    stored = make(0)
    disk.store([stored])
    assert file_of(directory, stored).read_bytes() == stored.item.header + bytes(stored.item.payload)


@pytest.mark.parametrize("direct", [True, False])
def test_direct_and_buffered_files_are_the_same(directory: Path, direct: bool) -> None:
    disk = Disk(directory)
    disk.tier._files.direct &= direct
    records = [*make_all(range(4)), *make_all(range(4), UNALIGNED)]
    disk.store(records)
    disk.close()
    again = Disk(directory)
    assert again.good(records) == {record.key for record in records}
    again.check()


def test_asking_does_not_count_as_use_and_loading_does(directory: Path) -> None:
    disk = Disk(directory, 4)
    for n in range(4):
        disk.store([make(n)])
    for _ in range(9):
        disk.present([make(0)])
    disk.good([make(1)])
    disk.store([make(4)])
    disk.store([make(5)])
    assert disk.present(make_all(range(6))) == [1, 3, 4, 5]
    assert disk.seen.events["evicted", "capacity"] == 2
    disk.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prefix_is_given_up_from_its_tail_also_after_a_restart(directory: Path, policy: str) -> None:
    first = Disk(directory, 8, policy)
    first.store(make_all(range(4)))
    first.store(make_all(range(10, 14)))
    first.check()
    second = Disk(directory, 8, policy)
    second.store(make_all(range(20, 22)))
    assert second.present(make_all(range(4))) == [0, 1]
    second.good(make_all(range(2)))
    second.check()
    third = Disk(directory, 6, policy)  # a smaller bound: two more have to go
    assert third.tier.num_bytes == 6 * RECORD_BYTES
    if policy == "lru":
        assert third.present(make_all(range(2))) == [0, 1]
        assert third.present(make_all(range(10, 14))) == [0, 1]
    third.check()


def test_times_of_use_survive_a_restart(directory: Path) -> None:
    records = make_all(range(3))
    disk = Disk(directory)
    disk.store(records)
    disk.close()
    for age, record in enumerate(records):
        path = file_of(directory, record)
        then = path.stat().st_mtime_ns - age * 3600 * 10**9
        os.utime(path, ns=(then, then))
    clock = ManualClock(50_000.0)
    again = Disk(directory, 1, clock=clock)
    assert [round(idle / 3600) for idle in again.seen.idle] == [2, 1]
    assert again.present(records) == [0]
    again.check()


def test_records_of_a_job_make_no_room_for_each_other(directory: Path) -> None:
    disk = Disk(directory, 4)
    disk.store(make_all(range(3)))
    assert disk.store(make_all(range(6))) == {record.key for record in make_all(range(4))}
    assert disk.present(make_all(range(6))) == [0, 1, 2, 3]
    disk.check()


def test_what_is_being_read_is_not_evicted(directory: Path) -> None:
    disk = Disk(directory, 2)
    disk.store(make_all(range(2)))
    into = aligned(make(0).item.payload.nbytes)
    load, store = disk.driver.next_id(), disk.driver.next_id()
    disk.tier._readers.drain()
    disk.tier.submit_load(load, [LoadItem(make(n).key, into) for n in range(1)])
    disk.tier._index[make(0).key].num_pins += 1  # a second reader, that takes its time
    disk.tier.submit_store(store, [record.item for record in make_all(range(2, 4))])
    assert set(disk.driver.wait(load).loaded) == {make(0).key}
    assert disk.driver.wait(store).stored == (make(2).key,)
    assert disk.present(make_all(range(4))) == [0, 2]
    disk.check()


def test_two_jobs_that_want_the_same_record(disk: Disk) -> None:
    one, other = disk.driver.next_id(), disk.driver.next_id()
    disk.tier.submit_store(one, [make(0).item, make(1).item])
    disk.tier.submit_store(other, [make(1).item, make(2).item])
    assert disk.driver.wait(one).stored == (make(0).key, make(1).key)
    assert disk.driver.wait(other).stored == (make(1).key, make(2).key)
    assert disk.seen.events["stored"] == 3


def test_a_record_removed_and_wanted_again_while_it_is_written(disk: Disk) -> None:
    one, other = disk.driver.next_id(), disk.driver.next_id()
    disk.tier.submit_store(one, [make(0).item])
    disk.tier.remove([make(0).key])
    disk.tier.submit_store(other, [make(0).item])
    assert disk.driver.wait(other).stored == (make(0).key,)
    assert disk.good([make(0)]) == {make(0).key}


def test_removed_and_stored_again_at_once(disk: Disk) -> None:
    """The old file's removal never takes the new file."""
    for _ in range(30):
        disk.store([make(0)])
        disk.tier.remove([make(0).key])
    disk.store([make(0)])
    assert disk.good([make(0)]) == {make(0).key}


def test_a_new_file_waits_until_the_old_one_is_gone(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(directory, num_writers=3)
    disk.store([make(0)])
    files, may_go = disk.tier._files, threading.Event()
    unlink = files.unlink
    monkeypatch.setattr(files, "unlink", lambda path: may_go.wait(30) and unlink(path))
    disk.tier.remove([make(0).key])
    again = disk.driver.next_id()
    disk.tier.submit_store(again, [make(0).item])
    disk.store([make(1)])  # asked for later, and not kept waiting
    assert disk.tier.lookup([make(0).key, make(1).key]) == [Presence.NOT_YET, Presence.YES]
    may_go.set()
    assert disk.driver.wait(again).stored == (make(0).key,)
    assert disk.good([make(0)]) == {make(0).key}
    disk.check()


def test_age_and_idle_time_are_told_of_what_goes(directory: Path) -> None:
    clock = ManualClock()
    disk = Disk(directory, 2, clock=clock)
    disk.store(make_all(range(2)))
    clock.advance(10)
    disk.good([make(0)])
    clock.advance(5)
    disk.store(make_all(range(2, 4)))
    assert disk.seen.idle == [15, 5]
    disk.check()


def test_what_could_not_be_found_again_is_not_written(disk: Disk, directory: Path) -> None:
    item, other = make(0).item, make(1).item
    job_id = disk.driver.next_id()
    disk.tier.submit_store(
        job_id,
        [
            item._replace(header=b"nonsense".ljust(4096)),
            other._replace(header=item.header),
            make(2).item._replace(payload=item.payload[:4096]),
        ],
    )
    assert disk.driver.wait(job_id).stored == ()
    assert disk.tier.writable and disk.tier.num_bytes == 0 and record_files(directory) == []


def test_keys_of_another_length_are_a_programmers_error(disk: Disk) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        disk.tier.submit_store(7, [make(0).item._replace(key=b"../../short")])
    with pytest.raises(ValueError, match="32 bytes"):
        disk.tier.submit_load(8, [LoadItem(b"", aligned(4096))])
    assert disk.tier.lookup([b"../x"]) == [Presence.NO]
    disk.tier.remove([b"../x"])


def test_a_record_larger_than_the_tier_evicts_nothing(directory: Path) -> None:
    disk = Disk(directory, 1.5)
    disk.store([make(0, UNALIGNED)])
    small = Disk(directory.with_name("small"), 0.9)
    small.store([make(0, UNALIGNED)])
    assert small.store([make(1)]) == set()
    assert small.present([make(0, UNALIGNED)]) == [0]
    disk.check()
    small.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_counter_is_exact_after_ten_thousand_operations(policy: str, fast_directory: Path) -> None:
    disk = Disk(fast_directory, 50.4, policy)
    records = make_all(range(150)) + make_all(range(150), UNALIGNED)
    state = 1
    operations = 0
    while operations < 10_000:
        state = state * 6364136223846793005 + 1442695040888963407 & (1 << 64) - 1
        first, action, n = (state >> 40) % 300, (state >> 33) % 8, 1 + (state >> 36) % 16
        some = records[first : first + n]
        if action < 5:
            disk.store(some)
        elif action == 5:
            disk.tier.remove([record.key for record in some[:4]])
        elif action == 6:
            disk.good(some)
        elif state >> 60 == 7:
            disk.tier.reconcile()
        assert disk.tier.num_bytes <= disk.tier.capacity_bytes
        operations += len(some)
    assert disk.seen.events["evicted", "capacity"] > 500
    assert set(disk.seen.errors) <= {0}
    disk.check()
    again = Disk(fast_directory, 50.4, policy)
    assert again.tier.num_bytes == disk.tier.num_bytes
    assert again.tier.num_records == disk.tier.num_records
    again.check()


@pytest.fixture
def fast_directory(directory: Path) -> Iterator[Path]:
    """A directory in memory where there is one: many small files without a disk's waiting."""
    import tempfile

    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else directory.parent) as made:
        yield Path(made) / "tier"


class TestDirectory:
    def refused(self, directory: Path, match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            Disk(directory)

    def test_one_owner(self, disk: Disk, directory: Path) -> None:
        disk.store([make(0)])
        self.refused(directory, "in use by another process")
        assert disk.good([make(0)]) == {make(0).key}
        disk.close()
        again = Disk(directory)
        assert again.present([make(0)]) == [0]
        again.close()

    def test_a_directory_of_other_things_is_left_alone(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "thesis.txt").write_text("years of work")
        self.refused(directory, "must be empty or its own")
        assert os.listdir(directory) == ["thesis.txt"]

    def test_no_directory(self, directory: Path) -> None:
        directory.write_text("a file")
        self.refused(directory, "cannot use")
        self.refused(Path("/proc/self/nowhere"), "cannot use")

    def test_a_folder_that_leads_elsewhere(self, directory: Path, tmp_path: Path) -> None:
        Disk(directory).close()
        (directory / "ab").rmdir()
        (directory / "ab").symlink_to(tmp_path)
        self.refused(directory, "cannot use")

    def test_an_open_directory_is_closed_to_others(self, directory: Path) -> None:
        directory.mkdir(mode=0o755)
        Disk(directory).check()
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700

    def test_it_needs_room_and_threads(self, directory: Path) -> None:
        for options in ({"num_readers": 0}, {"num_writers": 0}, {"max_quarantined": -1}):
            with pytest.raises(ConfigError):
                Disk(directory, **options)  # type: ignore[arg-type]
        with pytest.raises(ConfigError):
            DiskTier(directory, 0, make_policy("lru", 1), clock=ManualClock(), failpoints=Failpoints())


class TestReconcile:
    def reconcile(self, disk: Disk) -> list[int]:
        """Two rounds: what the first begins, the second finds done."""
        for _ in range(2):
            disk.tier.reconcile()
            disk.tier._writers.drain()
            disk.driver.collect()
        return disk.seen.errors

    def test_nothing_to_do(self, disk: Disk) -> None:
        disk.store(make_all(range(5)))
        assert self.reconcile(disk) == [0, 0]
        assert disk.present(make_all(range(5))) == [0, 1, 2, 3, 4]

    def test_files_that_do_not_belong(self, disk: Disk, directory: Path) -> None:
        stored = make(7)
        (directory / "ab" / "junk").write_bytes(bytes(5000))
        (directory / "tmp" / "left").write_bytes(bytes(100))
        file_of(directory, stored).write_bytes(stored.item.header)
        assert self.reconcile(disk) == [8192 + 4096 + 4096, 0]
        assert directory_bytes(directory) == disk.tier.num_bytes == 0

    def test_files_that_are_gone_or_changed(self, disk: Disk, directory: Path) -> None:
        records = make_all(range(4))
        disk.store(records)
        file_of(directory, records[0]).unlink()
        os.truncate(file_of(directory, records[1]), 5000)
        assert self.reconcile(disk) == [-RECORD_BYTES - 4096, 0]
        assert disk.present(records) == [2, 3]
        assert disk.seen.events["evicted", "missing"] == disk.seen.events["quarantined", "length"] == 1
        assert disk.tier.num_bytes == directory_bytes(directory)

    def test_a_person_empties_the_quarantine(self, disk: Disk, directory: Path) -> None:
        disk.store([make(0)])
        path = file_of(directory, make(0))
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        assert disk.good([make(0)]) == set()
        disk.tier._writers.drain()
        (name,) = quarantined(directory)
        (directory / "quarantine" / name).unlink()
        assert self.reconcile(disk) == [-RECORD_BYTES, 0]

    def test_under_load_it_takes_nothing_away(self, directory: Path) -> None:
        disk = Disk(directory, 30)
        records = make_all(range(60))
        jobs = []
        for n in range(0, 60, 3):
            disk.tier.reconcile()
            jobs.append(disk.driver.next_id())
            disk.tier.submit_store(jobs[-1], [record.item for record in records[n : n + 3]])
            disk.tier.remove([records[n // 2].key])
        for job_id in jobs:
            disk.driver.wait(job_id)
        assert set(disk.seen.errors) <= {0}
        held = disk.present(records)
        assert disk.good(records) == {records[n].key for n in held}
        disk.check()
