"""Which blocks make which, and which regions belong together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.transfer.regroup import Regroup, Regrouped
from shared.transfer.shards import RankGenerations, ranks_of, region_name
from shared.types.transfer import BlockRef


def test_ranks_are_found_in_order_and_up_to_the_first_gap() -> None:
    names = {region_name("kv", rank, 3): rank for rank in (2, 0, 1)}
    assert ranks_of(names, "kv") == [0, 1, 2]
    assert ranks_of({"kv.0": 0, "kv.2": 2}, "kv") == [0]
    assert ranks_of({"kv": 9, "kv.0": 0}, "kv") == [9]
    assert ranks_of({"ec": 1}, "kv") == []


def test_generations_are_written_to_every_rank() -> None:
    tables = [[0] * 3, [0] * 3]
    generations = RankGenerations(tables)
    generations[1] += 5
    assert tables == [[0, 5, 0], [0, 5, 0]]
    assert (len(generations), generations[1]) == (3, 5)


@given(
    sizes=st.sampled_from([(4, 8), (8, 4), (2, 12), (12, 2), (16, 32), (32, 16)]),
    num_tokens=st.integers(1, 100),
    cuts=st.lists(st.integers(1, 7), max_size=12),
    held=st.integers(0, 5),
)
def test_announced_in_runs_every_block_is_asked_for_once_and_as_soon_as_it_can_be(
    sizes: tuple[int, int], num_tokens: int, cuts: list[int], held: int
) -> None:
    theirs, ours = sizes
    num_sources, num_targets = -(-num_tokens // theirs), -(-num_tokens // ours)
    table = list(range(100, 100 + num_targets))
    wanted = list(range(min(held, num_targets), num_targets))
    refs = [BlockRef(index, 1, ()) for index in range(num_sources)]
    regroup = Regroup(theirs, ours, num_tokens, 2)
    asked: list[int] = []
    first = 0
    for count in [*cuts, num_sources]:
        run = refs[first : first + count]
        found = regroup.add(first, run, table, [index for index in wanted if index not in asked])
        first = min(first + count, num_sources)
        if found is not None:
            asked += found.targets
            check_regrouped(found, theirs, ours, num_tokens)
        tokens = num_tokens if first == num_sources else first * theirs
        assert asked == [i for i in wanted if min((i + 1) * ours, num_tokens) <= tokens]
    assert asked == wanted


def check_regrouped(found: Regrouped, theirs: int, ours: int, num_tokens: int) -> None:
    """Exactly the blocks that hold tokens of the targets are pulled, each to its tokens' place."""
    begin = found.targets[-1] + 1 - len(found.reslice.into)
    assert [i + begin for i, b in enumerate(found.reslice.into) if b >= 0] == found.targets
    assert [b for b in found.reslice.into if b >= 0] == [100 + index for index in found.targets]
    tokens = {t for i in found.targets for t in range(i * ours, (i + 1) * ours) if t < num_tokens}
    assert sorted({t // theirs for t in tokens}) == [b.remote.block_id for b in found.blocks]
    for block in found.blocks:
        assert block.local_block * theirs + begin * ours == block.remote.block_id * theirs
