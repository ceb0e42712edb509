"""The tier over a real Mooncake, in processes of its own: the contract, others' records, and what fails."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.telemetry import metrics
from shared.tiering.external import load_tier
from shared.tiering.offload import LoadItem, OffloadTier, Presence, StoreItem
from tests.contract.tiering.harness import Driver, Stored, aligned, make, make_all
from tests.unit.tiering.mooncake_setting import Cluster

pytest.importorskip("mooncake.store", reason="mooncake is not installed", exc_type=ImportError)

# The contract, as far as it knows nothing of files and of records that outlive their tier.
from tests.contract.tiering.test_tiers import (  # noqa: F401
    test_a_destination_of_another_length_is_left_out,
    test_a_job_larger_than_the_tier_is_stored_in_part,
    test_a_record_removed_while_it_is_written_is_gone,
    test_an_empty_job_ends,
    test_close_waits_for_jobs_and_lets_go,
    test_jobs_under_way_together_all_end,
    test_more_than_fits_is_never_kept,
    test_removed_records_are_gone_and_their_room_is_back,
    test_storing_again_says_stored,
    test_unknown_keys_are_left_out,
    test_what_was_stored_is_loaded_as_it_was,
)

_numbers = itertools.count()
MakeTier = Callable[[], OffloadTier]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """For tests that leave it as it is."""
    made = Cluster(tmp_path_factory.mktemp("mooncake"))
    made.start_master()
    made.start_holder()
    yield made
    made.close()


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Not running yet."""
    made = Cluster(tmp_path)
    yield made
    made.close()


def tier_of(cluster: Cluster, prefix: str, **options: object) -> OffloadTier:
    """A tier that has tried to reach its master."""
    options = {"master": cluster.master, "capacity_mb": 1, "stage_mb": 1, "prefix": prefix, **options}
    made = load_tier("shared.tiering.mooncake:MooncakeTier", options)
    Driver(made).settle()
    return made


@pytest.fixture
def make_tier(cluster: Cluster) -> MakeTier:
    """Each test has names of its own."""
    prefix = f"{next(_numbers)}/"
    return lambda: tier_of(cluster, prefix)


@pytest.fixture
def tier(make_tier: MakeTier) -> Iterator[OffloadTier]:
    made = make_tier()
    yield made
    made.close()
    made.close()


@pytest.fixture
def driver(tier: OffloadTier) -> Driver:
    return Driver(tier)


def test_what_others_stored_is_asked_after_and_found(driver: Driver, make_tier: MakeTier) -> None:
    stored, unknown = make_all(range(3)), make(50)
    driver.store(stored)
    other = Driver(make_tier())
    keys = [record.key for record in (*stored, unknown)]
    assert other.tier.lookup(keys) == [Presence.NOT_YET] * 4
    other.settle()
    assert other.tier.lookup(keys) == [Presence.YES] * 3 + [Presence.NO]
    assert other.good(stored) == set(keys[:3])
    assert other.tier.num_bytes == 0  # it is not its own
    other.tier.close()


def test_a_record_that_is_gone_is_a_miss_and_its_room_is_back(driver: Driver, make_tier: MakeTier) -> None:
    records = make_all(range(2))
    driver.store(records)
    other = Driver(make_tier())
    other.tier.remove([records[0].key])
    other.settle()
    other.tier.close()
    held = driver.tier.num_bytes
    assert driver.present(records) == [0, 1]  # as far as this one knows
    assert driver.good(records) == {records[1].key}
    assert driver.present(records) == [1]
    assert driver.tier.num_bytes == held // 2


def test_what_is_no_record_is_a_miss_and_can_be_stored_anew(driver: Driver) -> None:
    record = make(0)
    item = StoreItem(record.key, b"?" * len(record.item.header), record.item.payload)
    assert driver.store([Stored(item, record.record)]) == {record.key}
    assert driver.good([record]) == set()
    assert driver.present([record]) == []
    assert driver.store([record]) == {record.key}
    assert driver.good([record]) == {record.key}


def test_more_than_the_stage_takes_goes_in_turns(driver: Driver) -> None:
    """1 MiB of stage; with room for headers 13 records of a load are all that fit."""
    records = make_all(range(60))
    assert driver.store(records) == {record.key for record in records}
    assert driver.good(records) == {record.key for record in records}


def test_a_dead_holder_is_a_miss(own_cluster: Cluster) -> None:
    own_cluster.start_master()
    own_cluster.start_holder()
    driver = Driver(tier_of(own_cluster, ""))
    records = make_all(range(3))
    assert len(driver.store(records)) == 3
    own_cluster.kill("mooncake_client")
    assert driver.good(records) == set()
    assert driver.tier.writable
    driver.tier.close()


def test_a_dead_master_is_a_miss_until_it_is_back(own_cluster: Cluster) -> None:
    pauses = metrics.TIER_DISABLED.labels("mooncake")
    own_cluster.start_master()
    own_cluster.start_holder()
    driver = Driver(tier_of(own_cluster, ""))
    records = make_all(range(3))
    assert len(driver.store(records)) == 3
    own_cluster.kill("mooncake_master")
    before = pauses._value.get()
    assert driver.good(records) == set()
    assert not driver.tier.writable
    assert pauses._value.get() == before + 1
    assert driver.tier.lookup([record.key for record in records]) == [Presence.NO] * 3
    assert driver.store([make(50)]) == set() and driver.good(records) == set()  # at once
    own_cluster.kill("mooncake_client")
    own_cluster.start_master()
    own_cluster.start_holder()
    while not driver.tier.writable or not driver.store([make(60)]):
        driver.settle()
    driver.good(records)
    assert driver.store(records) == {record.key for record in records}
    assert driver.good(records) == {record.key for record in records}
    driver.tier.close()


def test_a_library_process_that_dies_is_replaced(cluster: Cluster) -> None:
    driver = Driver(tier_of(cluster, "dies/"))
    records = make_all(range(3))
    driver.store(records)
    os.kill(driver.tier._link._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    assert driver.good(records) == set()
    while not driver.tier.writable:
        driver.settle()
    assert driver.good(records) == {record.key for record in records}
    driver.tier.close()


def test_a_frozen_library_process_keeps_nobody_waiting_but_its_jobs(cluster: Cluster) -> None:
    driver = Driver(tier_of(cluster, "frozen/"))
    records = make_all(range(3))
    driver.store(records)
    pid = driver.tier._link._process.pid  # type: ignore[attr-defined]
    os.kill(pid, signal.SIGSTOP)
    job_id = driver.next_id()
    into = aligned(records[0].item.payload.nbytes)
    driver.tier.submit_load(job_id, [LoadItem(records[0].key, into)])
    while driver.tier.lookup([record.key for record in records]) != [Presence.NO] * 3:
        pass  # until the call has taken long
    assert driver.tier.finished() == []
    os.kill(pid, signal.SIGCONT)
    assert set(driver.wait(job_id).loaded) == {records[0].key}
    assert driver.present(records) == [0, 1, 2]
    driver.tier.close()


def test_memory_given_to_mooncake_serves_others(own_cluster: Cluster) -> None:
    own_cluster.start_master()
    giver, taker = tier_of(own_cluster, "", segment_mb=16), tier_of(own_cluster, "")
    records = make_all(range(3))
    assert len(Driver(taker).store(records)) == 3
    assert Driver(giver).good(records) == {record.key for record in records}
    taker.close()
    giver.close()


def test_without_mooncake_it_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.tiering.mooncake.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed"):
        load_tier("shared.tiering.mooncake:MooncakeTier", {"master": "127.0.0.1:1", "capacity_mb": 1})
