"""Placement by rendezvous hashing: a pure function of names that moves as little as can be, evenly spread."""

from __future__ import annotations

import hashlib
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.tiering.rendezvous import ranked

NAMES = st.lists(st.text(min_size=1, max_size=20), min_size=2, max_size=8, unique=True)
KEYS = [hashlib.sha256(n.to_bytes(4, "little")).digest() for n in range(400)]


def owners(nodes: list[str]) -> list[str]:
    return [ranked(nodes, key)[0] for key in KEYS]


@given(NAMES, st.randoms(use_true_random=False), st.binary(min_size=1, max_size=32))
def test_the_order_of_the_names_does_not_matter(nodes: list[str], random: Random, key: bytes) -> None:
    shuffled = list(nodes)
    random.shuffle(shuffled)
    assert ranked(shuffled, key) == ranked(nodes, key)
    assert sorted(ranked(nodes, key)) == sorted(nodes)


@settings(max_examples=30)
@given(NAMES)
def test_a_node_that_leaves_moves_its_own_keys_only(nodes: list[str]) -> None:
    gone, *rest = nodes
    before, after = owners(nodes), owners(rest)
    assert all(old == new for old, new in zip(before, after, strict=True) if old != gone)
    # Read backwards it is a node that comes: what moves, moves to it. About 1/n of the keys (5 sigma).
    expected = len(KEYS) / len(nodes)
    assert abs(before.count(gone) - expected) < 5 * expected**0.5


@given(NAMES, st.binary(min_size=1, max_size=32))
def test_without_a_node_the_others_keep_their_order(nodes: list[str], key: bytes) -> None:
    whole = ranked(nodes, key)
    for gone in nodes:
        rest = [node for node in nodes if node != gone]
        assert ranked(rest, key) == [node for node in whole if node != gone]


@settings(max_examples=30)
@given(NAMES)
def test_first_and_second_places_are_spread_evenly(nodes: list[str]) -> None:
    expected = len(KEYS) / len(nodes)
    for place in range(2):
        got = [ranked(nodes, key)[place] for key in KEYS]
        chi_square = sum((got.count(node) - expected) ** 2 / expected for node in nodes)
        # Far beyond the 99.99 % quantile of 7 degrees of freedom (29.9): only a skew gets there.
        assert chi_square < 45


def test_nodes_that_differ_in_one_digit_do_not_follow_each_other() -> None:
    nodes = [f"127.0.0.1:500{n}" for n in range(4)]
    pairs = [tuple(ranked(nodes, key)[:2]) for key in KEYS]
    expected = len(KEYS) / 12
    seen = {pair: pairs.count(pair) for pair in pairs}
    assert len(seen) == 12 and all(abs(n - expected) < 5 * expected**0.5 for n in seen.values())


def test_placement_is_what_it_was() -> None:
    # A change of the hash moves everything that is stored: it must be meant.
    nodes = ["a:1", "b:2", "c:3"]
    assert ranked(nodes, bytes([0]) * 32) == ["c:3", "a:1", "b:2"]
    assert ranked(nodes, bytes([1]) * 32) == ["a:1", "b:2", "c:3"]
    assert ranked(nodes, bytes([2]) * 32) == ["c:3", "b:2", "a:1"]
