"""Segments of a chain: the same name on the side that offers and the side that looks up."""

from __future__ import annotations

import pytest

from shared.kv_cache.segments import SEGMENT_BLOCKS, segment_start, wanted_blocks
from tests.unit.kv_cache.kv_builders import make_hasher, make_manager

NUM_BLOCKS = 2 * SEGMENT_BLOCKS + 3
PROMPT = [n % 250 for n in range(4 * NUM_BLOCKS)]


@pytest.mark.parametrize("first", [0, 1, 63, 64, 100, 128, 130])
def test_a_block_is_wanted_under_the_hash_of_its_segments_first_block(first: int) -> None:
    chain = list(make_hasher().prompt(PROMPT))
    wanted = wanted_blocks(make_hasher().prompt(PROMPT), first, NUM_BLOCKS - 1)
    assert [w.block for w in wanted] == chain[first : NUM_BLOCKS - 1]
    starts = [index // 64 * 64 for index in range(first, NUM_BLOCKS - 1)]
    assert [w.segment for w in wanted] == [chain[start].block_hash for start in starts]
    assert [segment_start(i) for i in range(first, NUM_BLOCKS - 1)] == starts


def test_a_committed_block_names_the_segment_under_which_it_is_wanted() -> None:
    manager = make_manager(num_blocks=(NUM_BLOCKS,))
    manager.open("a", PROMPT, (), "", "", 0)
    committed = []
    for end in (8, 4 * SEGMENT_BLOCKS, 4 * SEGMENT_BLOCKS + 4, len(PROMPT)):
        manager.reserve("a", end, writable_from=end - 1)
        committed += manager.commit("a", end, {})
    wanted = wanted_blocks(make_hasher().prompt(PROMPT), 0, NUM_BLOCKS)
    assert [(c.segment, c.block_hash) for c in committed] == [(w.segment, w.block.block_hash) for w in wanted]
