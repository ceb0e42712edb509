"""What every lower tier must do (``shared.tiering.offload``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.tiering.offload import LoadItem, Presence
from shared.tiering.record import CorruptRecord, decode_header, verify
from tests.contract.tiering.conftest import CAPACITY, MakeTier
from tests.contract.tiering.harness import LAYOUTS, Driver, aligned, make, make_all


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_stored_is_loaded_as_it_was(driver: Driver, layout: object) -> None:
    records = make_all(range(9), layout)  # type: ignore[arg-type]
    keys = {record.key for record in records}
    assert driver.present(records) == []
    assert driver.store(records) == keys
    assert driver.present(records) == list(range(9))
    assert driver.good(records) == keys
    assert 0 < driver.tier.num_bytes <= driver.tier.capacity_bytes == CAPACITY
    assert driver.tier.writable and driver.tier.name


def test_unknown_keys_are_left_out(driver: Driver) -> None:
    known, unknown = make_all(range(3)), make_all(range(50, 53))
    driver.store(known)
    assert driver.good([unknown[0], *known, *unknown[1:]]) == {record.key for record in known}
    assert driver.good(unknown) == set()
    driver.tier.remove([record.key for record in unknown])
    assert driver.present(known) == [0, 1, 2]


def test_an_empty_job_ends(driver: Driver) -> None:
    assert driver.store([]) == set()
    assert driver.load([]) == ({}, {})


def test_storing_again_says_stored(driver: Driver) -> None:
    records = make_all(range(4))
    driver.store(records[:2])
    held = driver.tier.num_bytes
    assert driver.store(records) == {record.key for record in records}
    assert driver.tier.num_bytes == 2 * held
    assert driver.store([records[0], records[0]]) == {records[0].key}


def test_a_destination_of_another_length_is_left_out(driver: Driver) -> None:
    record = make(0)
    driver.store([record])
    job_id = driver.next_id()
    driver.tier.submit_load(job_id, [LoadItem(record.key, aligned(record.item.payload.nbytes - 4096))])
    assert driver.wait(job_id).loaded == {}
    assert driver.good([record]) == {record.key}


def test_removed_records_are_gone_and_their_room_is_back(driver: Driver) -> None:
    records = make_all(range(4))
    driver.store(records)
    driver.tier.remove([record.key for record in records[:3]])
    assert driver.present(records) == [3]
    assert driver.good(records) == {records[3].key}
    driver.tier.remove([records[3].key, records[3].key])
    assert driver.store(records) == {record.key for record in records}
    assert driver.good(records) == {record.key for record in records}


def test_a_record_removed_while_it_is_written_is_gone(driver: Driver) -> None:
    record = make(0)
    job_id = driver.next_id()
    driver.tier.submit_store(job_id, [record.item])
    assert driver.tier.lookup([record.key]) != [Presence.NO]
    driver.tier.remove([record.key])
    assert driver.tier.lookup([record.key]) == [Presence.NO]
    assert driver.wait(job_id).stored == ()
    assert driver.present([record]) == []
    assert driver.store([record]) == {record.key}
    assert driver.good([record]) == {record.key}


def test_jobs_under_way_together_all_end(driver: Driver) -> None:
    records = make_all(range(24))
    stores = [driver.next_id() for _ in range(6)]
    for n, job_id in enumerate(stores):
        driver.tier.submit_store(job_id, [record.item for record in records[4 * n : 4 * n + 4]])
    assert {key for job_id in stores for key in driver.wait(job_id).stored} == {r.key for r in records}
    loads = {driver.next_id(): aligned(records[0].item.payload.nbytes) for _ in range(6)}
    for job_id, into in loads.items():
        driver.tier.submit_load(job_id, [LoadItem(records[0].key, into)])
    for job_id, into in loads.items():
        assert set(driver.wait(job_id).loaded) == {records[0].key}
        assert into == records[0].item.payload


def test_more_than_fits_is_never_kept(driver: Driver) -> None:
    records = make_all(range(200))
    for n in range(0, 200, 20):
        driver.store(records[n : n + 20])
        assert driver.tier.num_bytes <= CAPACITY
    held = driver.present(records)
    assert 0 < len(held) < 100 and set(held) & set(range(180, 200))
    assert driver.good(records) == {records[n].key for n in held}


def test_a_job_larger_than_the_tier_is_stored_in_part(driver: Driver) -> None:
    records = make_all(range(200))
    stored = driver.store(records)
    assert 0 < len(stored) < 200
    assert driver.tier.num_bytes <= CAPACITY
    assert driver.good(records) == stored


def test_close_waits_for_jobs_and_lets_go(make_tier: MakeTier) -> None:
    tier = make_tier()
    driver = Driver(tier)
    records = make_all(range(16))
    driver.store(records[:8])
    into = [aligned(record.item.payload.nbytes) for record in records[:8]]
    load, store = driver.next_id(), driver.next_id()
    tier.submit_load(load, [LoadItem(record.key, to) for record, to in zip(records[:8], into, strict=True)])
    tier.submit_store(store, [record.item for record in records[8:]])
    tier.close()
    driver.collect()
    assert len(driver.wait(load).loaded) == 8
    assert len(driver.wait(store).stored) == 8
    assert into == [record.item.payload for record in records[:8]]
    again = Driver(make_tier())
    assert again.good(records) == {record.key for record in records}
    again.tier.close()


def _objects(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and len(path.name) == 64)


@pytest.mark.parametrize("damage", ["flip", "cut", "swap", "empty"])
def test_a_tier_is_not_trusted(driver: Driver, tmp_path: Path, damage: str) -> None:
    """Whatever happened to the bytes: a record that is said to be loaded either is what was stored, or
    does not verify."""
    records = make_all(range(2))
    driver.store(records)
    one, other = _objects(tmp_path)
    data = bytearray(one.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
    elif damage == "cut":
        del data[-1:]
    elif damage == "empty":
        data.clear()
    one.write_bytes(other.read_bytes() if damage == "swap" else data)
    headers, into = driver.load(records)
    verified = set()
    for stored in records:
        if stored.key in headers:
            wanted = stored.record
            try:
                found = decode_header(headers[stored.key])
                verify(found, into[stored.key], wanted.content, wanted.identity, wanted.layout)
            except CorruptRecord:
                continue
            verified.add(stored.key)
    assert verified == {bytes.fromhex(other.name)}


def test_a_vanished_object_is_a_miss(driver: Driver, tmp_path: Path) -> None:
    records = make_all(range(2))
    driver.store(records)
    _objects(tmp_path)[0].unlink()
    assert len(driver.good(records)) == 1


def test_a_restarted_tier_still_holds_its_records(make_tier: MakeTier) -> None:
    records = make_all(range(5))
    driver = Driver(make_tier())
    driver.store(records)
    held = driver.tier.num_bytes
    driver.tier.close()
    again = Driver(make_tier())
    assert again.present(records) == list(range(5))
    assert again.tier.num_bytes == held
    assert again.good(records) == {record.key for record in records}
    again.tier.close()
