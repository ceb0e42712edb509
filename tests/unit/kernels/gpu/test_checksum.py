"""Checksums taken on the device are those of any other xxh3_64, and what is gathered is what was read."""

from __future__ import annotations

import pytest
import torch
import xxhash

from shared.kernels.gpu.checksum import block_sums, block_sums_twin, can_sum, gather_and_sum

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCKS, HEADS = 5, 3
#: Fewer than a kilobyte, whole kilobytes (one at a time and four), and some with a rest.
UNITS = (256, 960, 1024, 1088, 2048, 5 * 1024, 9 * 1024 + 64)


def memory(unit: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(-(2**62), 2**62, (BLOCKS, HEADS * unit // 8), generator=generator)
    return data.to(DEVICE)


def wanted(data_BX: torch.Tensor, blocks: list[int], unit: int) -> list[list[int]]:
    rows = [data_BX[block].cpu().numpy().tobytes() for block in blocks]
    return [[xxhash.xxh3_64_intdigest(row[h * unit : (h + 1) * unit]) for h in range(HEADS)] for row in rows]


def unsigned(sums_NH: torch.Tensor) -> list[list[int]]:
    return [[value % 2**64 for value in row] for row in sums_NH.tolist()]


def ids(*blocks: int) -> torch.Tensor:
    return torch.tensor(blocks, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("unit", UNITS)
def test_kernel_and_twin_give_the_algorithm_s_values(unit: int) -> None:
    data = memory(unit, unit)
    assert unsigned(block_sums_twin(data, ids(3, 0, 4), unit)) == wanted(data, [3, 0, 4], unit)
    assert unsigned(block_sums(data, ids(3, 0, 4), unit)) == wanted(data, [3, 0, 4], unit)


@pytest.mark.parametrize("unit", UNITS)
def test_blocks_arrive_whole_and_others_stay(unit: int) -> None:
    source, target = memory(unit, 1), memory(unit, 2)
    before = target.clone()
    sums = gather_and_sum(source, target, ids(3, 0), ids(1, 4), unit)
    assert unsigned(sums) == wanted(source, [3, 0], unit)
    assert torch.equal(target[[1, 4]], source[[3, 0]])
    assert torch.equal(target[[0, 2, 3]], before[[0, 2, 3]])


def test_memory_of_other_types_is_read_as_it_is() -> None:
    data = memory(1024, 3)
    halves = data.view(torch.bfloat16).view(BLOCKS, HEADS, 16, 32)
    assert torch.equal(block_sums(halves.flatten(1), ids(2), 1024), block_sums(data, ids(2), 1024))


def test_a_flipped_bit_changes_its_head_alone() -> None:
    data = memory(2048, 4)
    before = unsigned(block_sums(data, ids(1), 2048))[0]
    data[1, 2048 // 8 + 77] ^= 1 << 40
    after = unsigned(block_sums(data, ids(1), 2048))[0]
    assert [a == b for a, b in zip(after, before, strict=True)] == [True, False, True]


@pytest.mark.parametrize("unit", [64, 192, 250, 1000, 4096])
def test_sizes_that_do_not_fit_are_refused(unit: int) -> None:
    data = memory(1024, 5)
    assert not can_sum(unit) or data[0].nbytes % unit
    with pytest.raises(ValueError, match="have no checksums"):
        block_sums(data, ids(0), unit)


def test_nothing_is_gathered_from_nothing() -> None:
    assert block_sums(memory(1024, 6), ids(), 1024).shape == (0, HEADS)
