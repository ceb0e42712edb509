"""What the router remembers about caches."""

from __future__ import annotations

from shared.routing.affinity import MediaIndex, PrefixIndex
from shared.routing.placer import Placer
from shared.types.request import GenerationRequest, MediaItem, SamplingParams
from tests.unit.routing.test_policy import view


def test_only_full_blocks_count_and_a_chain_is_its_prefix() -> None:
    index = PrefixIndex(block_size=4)
    chain = index.chain(range(11))
    assert len(chain) == 2 and chain == index.chain(range(100))[:2]
    assert index.chain((9, *range(1, 8)))[1] != chain[1]


def test_media_and_salt_are_part_of_a_chain() -> None:
    index = PrefixIndex(block_size=4)
    plain = index.chain(range(12))
    first = index.chain(range(12), (MediaItem("a" * 64, 5, 2),))
    second = index.chain(range(12), (MediaItem("b" * 64, 5, 2),))
    assert plain[0] == first[0] == second[0]
    assert len({plain[1], first[1], second[1]}) == len({plain[2], first[2], second[2]}) == 3
    two = index.chain(range(12), (MediaItem("a" * 64, 5, 1), MediaItem("b" * 64, 6, 1)))
    assert two[1] not in (first[1], second[1])
    assert index.chain(range(12), salt="tenant")[0] != plain[0]


def test_match_counts_tokens_from_the_front() -> None:
    index = PrefixIndex(block_size=4)
    index.record(index.chain(range(8)), "p0")
    assert index.match(index.chain(range(20))) == {"p0": 8}
    index.record(index.chain(range(4)), "p1")
    assert index.match(index.chain(range(20))) == {"p1": 4, "p0": 8}
    assert index.match(index.chain([7, *range(1, 20)])) == {}


def test_memory_is_bounded_and_heads_outlive_tails() -> None:
    index = PrefixIndex(block_size=1, max_entries=6)
    index.record(index.chain(range(4)), "p0")
    index.record(index.chain(range(100, 104)), "p1")
    assert len(index) == 6
    assert index.match(index.chain(range(4))) == {"p0": 2}
    assert index.match(index.chain(range(100, 104))) == {"p1": 4}
    media = MediaIndex(max_entries=2)
    for name in "abc":
        media.record(name, f"e-{name}")
    assert [media.holder(name) for name in "abc"] == ["", "e-b", "e-c"] and len(media) == 2


def test_the_placer_sends_the_same_to_the_same() -> None:
    placer = Placer()
    views = [view(key) for key in ("p0", "p1", "p2", "d0", "e0", "e1")]
    loaded = [view("p0", num_requests=1), *views[1:]]
    media = (MediaItem("h" * 64, 0, 16),)
    prompt = tuple(range(600))
    request = GenerationRequest("r", "m", prompt, 600, SamplingParams(1), media=media)
    first = placer.place([view("e0", num_requests=5), *loaded[:-2], loaded[-1]], request)
    assert first is not None and first.prefill == "p1" and first.encoders[0][0] == "e1"
    longer = GenerationRequest("s", "m", (*prompt, 1, 2, 3), 603, SamplingParams(1), media=media)
    again = placer.place(views, longer)
    assert again is not None and again.prefill == "p1" and again.encoders[0][0] == "e1"
    fresh = GenerationRequest("t", "m", (5, *prompt), 601, SamplingParams(1))
    other = placer.place(views, fresh)
    assert other is not None and other.prefill == "p0"
    moved = placer.place(views, longer, frozenset({"p1", "e1"}))
    assert moved is not None and moved.prefill == "p0" and moved.encoders[0][0] == "e0"


def test_the_placer_needs_workers() -> None:
    request = GenerationRequest("r", "m", (1,), 1, SamplingParams(1))
    assert Placer().place([], request) is None


def test_a_worker_that_kept_its_blocks_keeps_its_place() -> None:
    request = GenerationRequest("r", "m", tuple(range(640)), 640, SamplingParams(4))
    for recalled in (True, False):
        placer = Placer()
        for key in ("p0/a", "p1/a", "d0/a"):
            placer.started(key[:2], key, False)
        views = [view("p0/a"), view("p1/a", num_requests=1), view("d0/a")]
        first = placer.place(views, request)
        assert first is not None and first.prefill == "p0/a"
        placer.started("p0", "p0/b", recalled)
        views = [view("p0/b", num_requests=1), view("p1/a"), view("d0/a")]
        again = placer.place(views, request)
        assert again is not None and again.prefill == ("p0/b" if recalled else "p1/a")
