"""The witness encoder packs rows into blocks and names one checksum an item."""

import random

import pytest
import xxhash

from shared.runner.witness import WitnessEncoderRunner
from shared.runner.witness_config import WitnessConfig
from shared.runner.witness_oracle import WitnessOracle
from shared.step import EncodeItem, EncodePlan

CONFIG = WitnessConfig(row_bytes=40)


def test_rows_lie_packed_in_their_blocks_and_the_checksum_covers_them() -> None:
    arena = bytearray(random.Random(1).randbytes(8 * 3 * 40))
    before = bytes(arena)
    encoder = WitnessEncoderRunner(CONFIG, memoryview(arena), rows_per_block=3)
    items = (
        EncodeItem("a", b"one", (), 7, (5, 0, 2)),
        EncodeItem("b", b"two", (), 3, (4,)),
    )
    result = encoder.execute(EncodePlan(9, items))
    oracle = WitnessOracle(CONFIG)
    one, two = b"".join(oracle.embedding_rows(b"one", 7)), b"".join(oracle.embedding_rows(b"two", 3))
    assert arena[600:720] + arena[0:120] + arena[240:280] == one
    assert arena[480:600] == two
    untouched = [*range(120, 240), *range(280, 480), *range(720, 960)]
    assert all(arena[at] == before[at] for at in untouched)
    assert result.step_id == 9
    assert result.checksums == (xxhash.xxh3_64_intdigest(one), xxhash.xxh3_64_intdigest(two))


def test_rows_depend_on_bytes_and_index() -> None:
    oracle = WitnessOracle(CONFIG)
    rows = oracle.embedding_rows(b"x", 4) + oracle.embedding_rows(b"y", 4)
    assert len(set(rows)) == 8 and {len(row) for row in rows} == {40}


def test_closing_twice_gives_the_memory_back() -> None:
    arena = bytearray(120)
    encoder = WitnessEncoderRunner(CONFIG, memoryview(arena), rows_per_block=3)
    with pytest.raises(BufferError):
        arena.append(0)
    encoder.close()
    encoder.close()
    arena.append(0)
