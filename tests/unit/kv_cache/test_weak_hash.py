"""With block hashes cut to a few bits, collisions are everywhere and a hit is still never wrong."""

from __future__ import annotations

import random

import pytest

from shared.types.request import MediaItem
from tests.unit.kv_cache.kv_builders import make_manager
from tests.unit.kv_cache.kv_world import BLOCK_SIZE, Model, World

MEDIA = [(), (MediaItem("cat", 1, 2),), (MediaItem("dog", 1, 2),), (MediaItem("cat", 3, 2),)]


def random_request(draw: random.Random) -> Model:
    tokens = [draw.randrange(2) for _ in range(draw.randrange(2, 11))]
    return Model(draw.choice(["", "tenant"]), draw.choice(MEDIA), tokens)


@pytest.mark.parametrize("num_blocks", [4000, 12])
@pytest.mark.parametrize("bits", [1, 2, 8, 256])
def test_hits_are_exactly_the_prefixes_that_were_computed_before(bits: int, num_blocks: int) -> None:
    draw = random.Random(bits)
    manager = make_manager([num_blocks], block_size=BLOCK_SIZE, bits=bits)
    world = World([num_blocks])
    computed: set[int] = set()  # last cell of every block that was ever published
    hashes: dict[bytes, set[int]] = {}
    hit_tokens = 0
    for number in range(600):
        key, seq = str(number), random_request(draw)
        size = len(seq.tokens)
        seq.computed = manager.open(key, seq.tokens, seq.media, seq.salt, "", size)
        world.assert_reads(manager, key, seq)
        ends = world.cells(seq, size)[BLOCK_SIZE - 1 :: BLOCK_SIZE]
        known = [end in computed for end in ends]
        if num_blocks > 1000:  # nothing was ever evicted: no hit may be missed either
            assert seq.computed == BLOCK_SIZE * [*known, False].index(False)
        hit_tokens += seq.computed
        manager.reserve(key, size, writable_from=seq.computed)
        world.write(manager, key, seq, range(seq.computed, size))
        for block in manager.commit(key, size, {}):
            hashes.setdefault(block.block_hash, set()).add(ends[block.index])
        computed.update(ends)
        manager.close(key)
    manager.check_integrity()
    assert hit_tokens > 150, "the test sees hits"
    collisions = sum(len(contents) - 1 for contents in hashes.values())
    assert collisions == 0 if bits == 256 else collisions > 50
