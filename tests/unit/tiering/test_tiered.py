"""KV blocks over memory and a lower tier: what comes up, what goes down, who waits, and for how long."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shared.kernels.checksum import head_checksums
from shared.telemetry import metrics
from shared.tiering.record import KvRecord, Record, encode_header
from shared.types.identity import IdentityKey
from tests.unit.tiering.tiered_setting import LAYOUT, NUM_BLOCKS, Bench, content, cut_key, key


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.reactor.run()
    made.check()
    made.arena.close()


def failures(reason: str) -> float:
    return float(metrics.PROMOTION_FAILURES.labels("disk", reason)._value.get())


def test_what_memory_lacks_is_loaded_and_stays(bench: Bench) -> None:
    bench.put(range(4))
    assert bench.lookup(range(6)) == 4
    assert bench.disk.num_loaded == 8
    assert bench.lookup(range(4)) == 4
    assert bench.disk.num_loaded == 8


def test_memorys_prefix_is_kept_while_the_rest_is_loaded(bench: Bench) -> None:
    bench.fill(range(2))
    bench.put(range(2, 5))
    bench.disk.held = True
    bench.ask(range(5))
    bench.reactor.run()
    assert bench.answers == []
    assert bench.crowd() == [1, 1]  # all others are pinned, or coming
    bench.disk.held = False
    bench.disk.release()
    bench.reactor.run()
    assert bench.take(range(5)) == 5


def test_a_hole_in_memory_is_filled(bench: Bench) -> None:
    bench.fill(range(3, 5))
    bench.put(range(3))
    assert bench.lookup(range(5)) == 5
    assert bench.disk.num_loaded == 6


def test_what_has_landed_stays_while_the_rest_is_on_its_way(bench: Bench) -> None:
    bench.put(range(2))
    bench.put(range(2, 4), into=bench.far)
    bench.far.held = True
    bench.ask(range(4))
    bench.reactor.run()
    assert bench.answers == [] and bench.disk.num_loaded == 4
    assert bench.crowd() == [NUM_BLOCKS - 4] * 2
    bench.far.release()
    bench.reactor.run()
    assert bench.take(range(4)) == 4


def test_room_that_one_group_lacks_is_given_back_in_the_other(bench: Bench) -> None:
    taken = bench.cpu[1].reserve(4)
    bench.put(range(4))
    assert bench.lookup(range(4)) == 2
    bench.cpu[1].discard(taken, late=False)


def test_a_block_counts_only_when_every_group_has_it(bench: Bench) -> None:
    bench.put(range(4), groups=(0,))
    bench.put(range(2), groups=(1,))
    assert bench.lookup(range(4)) == 2
    assert bench.disk.num_loaded == 4


def test_a_plain_miss_asks_for_one_row_and_is_answered_at_once(bench: Bench) -> None:
    bench.ask(range(6))
    assert bench.take(range(6)) == 0
    assert bench.disk.asked == [bench.record(0, 0), bench.record(0, 1)]


def test_concurrent_look_ups_share_one_load(bench: Bench) -> None:
    bench.put(range(3))
    bench.disk.held = True
    bench.ask(range(3))
    bench.ask(range(2))
    bench.disk.release()
    bench.reactor.run()
    assert bench.disk.num_loaded == 6
    assert sorted(len(pinned[0]) for _, pinned in bench.answers) == [2, 3]
    bench.leases.release([lease_id for lease_id, _ in bench.answers])


def test_other_content_under_the_same_hash_is_not_waited_for(bench: Bench) -> None:
    bench.put(range(1))
    bench.disk.held = True
    bench.ask(range(1))
    other = [key(0, group, tokens=(9, 9)) for group in (0, 1)]
    bench.tiers.lookup(other, lambda lease_id, pinned: bench.answers.append((lease_id, pinned)))
    assert bench.take(range(1)) == 0
    bench.disk.release()
    bench.reactor.run()
    assert bench.take(range(1)) == 1


def test_a_record_of_other_content_is_a_miss_and_removed(bench: Bench) -> None:
    bench.put(range(1))
    before = failures("key")
    other = [key(0, group, tokens=(9, 9)) for group in (0, 1)]
    bench.tiers.lookup(other, lambda lease_id, pinned: bench.answers.append((lease_id, pinned)))
    bench.reactor.run()
    assert bench.take(range(1)) == 0
    assert failures("key") == before + 2 and not bench.disk.records


def test_two_blocks_of_one_prefix_under_one_hash_are_not_loaded_at_a_time() -> None:
    """Both would be that hash's load: one would end the other's, and its room and look-up be lost."""
    bench = Bench(key=cut_key)
    bench.put(range(3))  # the fourth has the first one's hash
    assert bench.lookup(range(6)) == 3
    assert bench.disk.num_loaded == 6
    bench.check()
    bench.put(range(3, 6))
    assert bench.lookup(range(1, 6)) == 3  # 1 and 2 from memory, and 3, which takes the place of 0
    assert bench.lookup(range(3, 6)) == 3
    bench.reactor.run()
    bench.check()
    bench.arena.close()


def test_what_is_loaded_counts_for_who_asked() -> None:
    bench = Bench(tenant_share=0.5)
    bench.fill(range(10, 10 + NUM_BLOCKS))
    bench.put(range(5))
    assert bench.lookup(range(5), "tenant") == 3, "its share of six blocks, since others hold the rest"
    assert [tier.num_held_by("tenant") for tier in bench.cpu] == [3, 3]
    assert bench.lookup(range(10, 13)) == 3, "others keep theirs"
    bench.evict_all()
    assert bench.lookup(range(5), "tenant") == 5, "what is free is anybody's"
    bench.put(range(20, 26))
    assert bench.lookup(range(20, 23), "other") == 3, "who is beyond its share gives first"
    assert [tier.num_held_by("tenant") for tier in bench.cpu] == [3, 3]
    assert bench.lookup(range(23, 26)) == 3, "without a tenant nothing is counted"
    bench.reactor.run()
    bench.check()
    bench.arena.close()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda header, payload: (header, bytes([payload[0] ^ 1]) + payload[1:]), "payload"),
        (lambda header, payload: (header[:40] + bytes([header[40] ^ 1]) + header[41:], payload), "checksum"),
        (lambda header, payload: (b"", payload), "length"),
        (lambda header, payload: (header, payload[:-1]), "missing"),
    ],
)
def test_what_does_not_verify_is_a_counted_miss(bench: Bench, damage, reason: str) -> None:
    bench.put(range(3))
    name = bench.record(1)
    bench.disk.records[name] = damage(*bench.disk.records[name])
    before = failures(reason)
    assert bench.lookup(range(3)) == 1
    assert failures(reason) == before + 1
    assert (name in bench.disk.records) == (reason == "missing")
    bench.put(range(1, 2))
    assert bench.lookup(range(3)) == 3


def test_what_a_tier_finds_corrupt_itself_is_counted_as_that_once(bench: Bench) -> None:
    bench.put(range(3))
    bench.disk.corrupt = {bench.record(1)}
    before = [failures(reason) for reason in ("corrupt", "missing", "payload")]
    assert bench.lookup(range(3)) == 1
    assert [failures(reason) for reason in ("corrupt", "missing", "payload")] == [before[0] + 1, *before[1:]]


def test_another_models_record_is_a_miss(bench: Bench) -> None:
    bench.put(range(1))
    payload = memoryview(bytearray(content(0, 0)))
    foreign = Record(
        IdentityKey("other", "r", "t", "uint64"),
        LAYOUT,
        KvRecord.of(key(0)),
        head_checksums(payload, 2),
        payload.nbytes,
    )
    bench.disk.records[bench.record(0)] = (encode_header(foreign), bytes(payload))
    before = failures("identity")
    assert bench.lookup(range(1)) == 0
    assert failures("identity") == before + 1


def test_too_much_at_a_time_is_a_shorter_hit() -> None:
    bench = Bench(max_loads=5)
    bench.put(range(4))
    assert bench.lookup(range(4)) == 2
    assert bench.lookup(range(4)) == 4
    bench.check()
    bench.arena.close()


def test_memory_that_is_pinned_makes_a_shorter_hit(bench: Bench) -> None:
    bench.fill(range(10, 14))
    bench.ask(range(10, 14))
    bench.reactor.run()
    lease = bench.answers.pop()[0]
    bench.put(range(4))
    assert bench.lookup(range(4)) == 2
    bench.leases.release([lease])


def test_the_deadline_answers_with_what_is_there_and_the_rest_arrives_for_the_next(bench: Bench) -> None:
    bench.fill(range(1))
    bench.put(range(1, 3))
    bench.disk.held = True
    bench.ask(range(3))
    bench.reactor.run()
    bench.clock.advance(1.0)
    bench.reactor.run()
    assert bench.take(range(3)) == 1
    bench.disk.release()
    bench.reactor.run()
    assert bench.answers == []
    assert bench.lookup(range(3)) == 3


def test_not_yet_is_asked_again_when_the_tier_has_news(bench: Bench) -> None:
    bench.put(range(1))
    bench.disk.unsure = {bench.record(1, 0), bench.record(1, 1)}
    bench.ask(range(3))
    bench.reactor.run()
    assert bench.answers == []
    bench.put(range(1, 2))
    bench.disk.unsure = set()
    bench.disk.release()
    bench.reactor.run()
    assert bench.take(range(3)) == 2


def test_the_second_use_is_written_and_the_first_is_not(bench: Bench) -> None:
    bench.fill(range(3))
    bench.reactor.run()
    assert bench.disk.num_stored == 0
    assert bench.lookup(range(2)) == 2
    assert set(bench.disk.records) == {bench.record(n, group) for n in range(2) for group in (0, 1)}
    bench.evict_all()
    assert bench.lookup(range(3)) == 2


def test_what_is_written_takes_what_leads_to_it_along(bench: Bench) -> None:
    """A worker that keeps the head of a prompt never asks for it; below, the rest is worth nothing alone."""
    bench.fill(range(5))
    for _ in range(2):
        assert bench.lookup(range(3, 5)) == 2
    assert list(bench.disk.records) == [bench.record(n, group) for n in range(5) for group in (0, 1)]
    assert bench.disk.num_stored == 10, "each once"
    bench.evict_all()
    assert bench.lookup(range(5)) == 5


def test_what_leads_to_something_is_written_first_where_there_is_room_for_few() -> None:
    bench = Bench(max_stores=4)
    bench.fill(range(5))
    written = []
    for _ in range(3):
        assert bench.lookup(range(3, 5)) == 2
        written.append({n for n in range(5) if bench.record(n, 0) in bench.disk.records})
        assert all((bench.record(n, 1) in bench.disk.records) == (n in written[-1]) for n in range(5))
    assert written == [{0, 1}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}]
    bench.check()
    bench.arena.close()


def test_an_offer_for_the_first_time_takes_nothing_along(bench: Bench) -> None:
    bench.fill(range(3))
    bench.fill(range(3, 6))
    bench.reactor.run()
    assert bench.disk.num_stored == 0


def test_what_was_written_is_not_written_again_before_a_while(bench: Bench) -> None:
    bench.fill(range(1))
    for _ in range(3):
        bench.lookup(range(1))
    assert bench.disk.num_stored == 2
    bench.clock.advance(60.0)
    bench.lookup(range(1))
    assert bench.disk.num_stored == 4


def test_what_came_from_below_is_not_written_back(bench: Bench) -> None:
    bench.put(range(2))
    for _ in range(3):
        assert bench.lookup(range(2)) == 2
    assert bench.disk.num_stored == 0


def test_a_block_that_is_being_written_stays_where_it_is(bench: Bench) -> None:
    bench.fill(range(1))
    bench.disk.held = True
    bench.lookup(range(1))
    assert bench.crowd() == [NUM_BLOCKS - 1] * 2
    bench.disk.release()
    bench.reactor.run()
    bench.evict_all()


def test_writes_that_are_off_or_find_no_room_change_nothing() -> None:
    bench = Bench(max_stores=2)
    bench.disk.open = False
    bench.fill(range(2))
    assert bench.lookup(range(2)) == 2 and bench.disk.num_stored == 0
    bench.disk.open = True
    assert bench.lookup(range(2)) == 2
    assert set(bench.disk.records) == {bench.record(0, 0), bench.record(0, 1)}
    bench.check()
    bench.arena.close()
