"""The witness runner against its oracle, under every way of scheduling; and what it must notice."""

import random
import subprocess
import sys
from typing import Any

import pytest
import xxhash

from shared.runner.witness import WitnessRunner
from shared.runner.witness_config import WitnessConfig
from shared.runner.witness_oracle import WitnessOracle
from shared.step import BlockSeal, NewRow, RowStep, StepPlan
from shared.types.kv import KVCacheSpec, KVGroupSpec
from shared.types.request import SamplingParams
from tests.unit.runner.witness_driver import Driver, Job, one_group

CONFIG = WitnessConfig(eos_period=24)
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def random_job(rnd: random.Random) -> Job:
    prompt = [rnd.randrange(CONFIG.vocab_size) for _ in range(rnd.randint(1, 60))]
    media = []
    offset = rnd.randint(0, 6)
    while rnd.random() < 0.5:
        count = rnd.randint(4, 8)
        if offset + count >= len(prompt):
            break
        prompt[offset : offset + count] = [CONFIG.image_token_id] * count
        media.append((offset, count, rnd.randbytes(20)))
        offset += count + rnd.randint(0, 5)
    sampling = SamplingParams(
        max_tokens=rnd.randint(1, 40),
        temperature=rnd.choice([0.0, 0.0, 1.0, 2.0]),
        top_k=rnd.choice([0, 0, 3]),
        top_p=rnd.choice([1.0, 1.0, 0.8]),
        min_p=rnd.choice([0.0, 0.0, 0.1]),
        seed=rnd.getrandbits(63),
        repetition_penalty=rnd.choice([1.0, 1.0, 1.2]),
        frequency_penalty=rnd.choice([0.0, 0.0, 0.4]),
        stop_token_ids=rnd.choice([(), tuple(rnd.sample(range(252), 6))]),
        ignore_eos=rnd.random() < 0.3,
        min_tokens=rnd.choice([0, 0, 5]),
    )
    return Job(prompt, sampling, media, n=rnd.choice([1, 1, 2, 4]))


def assert_equals_oracle(config: WitnessConfig, jobs: list[Job], answers: list[list[Any]]) -> None:
    oracle = WitnessOracle(config)
    for job, choices in zip(jobs, answers, strict=True):
        for index, answer in enumerate(choices):
            assert answer == oracle.generate(job.prompt, job.sampling, index, job.media)[:2]


@pytest.mark.parametrize("depth", [1, 2], ids=["lockstep", "overlapped"])
@pytest.mark.parametrize("block_size", [4, 16, 32])
@pytest.mark.parametrize("seed", range(3))
def test_answers_equal_the_oracle_however_the_work_is_cut(seed: int, block_size: int, depth: int) -> None:
    rnd = random.Random(f"{seed} {block_size} {depth}")
    jobs = [random_job(rnd) for _ in range(8)]
    driver = Driver(CONFIG, one_group(CONFIG, block_size), rnd, depth=depth)
    assert_equals_oracle(CONFIG, jobs, driver.run(jobs))


def test_several_layers_in_two_groups() -> None:
    config = WitnessConfig(num_layers=3, num_kv_heads=3, eos_period=24)
    groups = (KVGroupSpec(1, 3, 1, "uint64"), KVGroupSpec(2, 3, 1, "uint64"))
    rnd = random.Random(7)
    jobs = [random_job(rnd) for _ in range(6)]
    driver = Driver(config, KVCacheSpec(8, groups), rnd)
    assert_equals_oracle(config, jobs, driver.run(jobs))


def test_a_bounded_number_of_candidates_and_an_odd_vocabulary() -> None:
    config = WitnessConfig(
        candidates=5, num_text_tokens=13, vocab_size=20, eos_token_id=19, image_token_id=18
    )
    rnd = random.Random(2)
    jobs = [
        Job([rnd.randrange(13) for _ in range(9)], SamplingParams(max_tokens=30, seed=s)) for s in range(5)
    ]
    driver = Driver(config, one_group(config, 4), rnd)
    assert_equals_oracle(config, jobs, driver.run(jobs))


def test_logprobs_are_reported_for_rows_that_ask() -> None:
    runner, table = prefilled(list(range(10)), SamplingParams(max_tokens=8, temperature=0.0, logprobs=3))
    result = runner.execute(StepPlan(2, rows=(RowStep(0, 10, (7,), len(table), ((),), (0,)),))).result()
    (logprobs,) = result.logprobs
    assert logprobs is not None
    assert logprobs.rank == 0 and logprobs.top_ids[0] == result.token_ids[0] and len(logprobs.top_ids) == 3


# --- what the state must notice -------------------------------------------------------------


def prefilled(
    prompt: list[int], sampling: SamplingParams = GREEDY, block_size: int = 4
) -> tuple[WitnessRunner, tuple[int, ...]]:
    """A runner with one row whose prompt is computed, and the row's block table."""
    runner, _, table = prefilled_in(bytearray(64 * 2 * 2 * 8 * block_size), prompt, sampling, block_size)
    return runner, table


def prefilled_in(
    arena: bytearray, prompt: list[int], sampling: SamplingParams = GREEDY, block_size: int = 4
) -> tuple[WitnessRunner, bytearray, tuple[int, ...]]:
    runner = WitnessRunner(CONFIG, one_group(CONFIG, block_size), [memoryview(arena)])
    table = tuple(range(40, 40 - -(-len(prompt) // block_size), -1))
    new = NewRow(0, "r", 0, tuple(prompt), len(prompt), sampling)
    step = RowStep(0, 0, tuple(prompt), 0, (table,))
    runner.execute(StepPlan(1, new_rows=(new,), rows=(step,))).result()
    return runner, arena, table


def test_every_valid_bit_counts_and_no_other() -> None:
    prompt, block_size = list(range(30, 40)), 4  # the last of three blocks holds two tokens
    arena = bytearray(random.Random(1).randbytes(64 * 2 * 2 * 8 * block_size))
    runner, _, table = prefilled_in(arena, prompt, block_size=block_size)
    state = int(runner.states([0], [10])[0])
    assert state == WitnessOracle(CONFIG).state(prompt)
    extent = 2 * 2 * block_size * 8
    for index, block in enumerate(table):
        for at in range(extent):
            position = index * block_size + at // 8 % block_size
            bit = 1 << (at % 8)
            arena[block * extent + at] ^= bit
            changed = int(runner.states([0], [10])[0]) != state
            arena[block * extent + at] ^= bit
            assert changed == (position < 10), f"block {index}, byte {at}"
    assert int(runner.states([0], [10])[0]) == state


def test_a_flip_before_the_next_step_changes_all_that_follows() -> None:
    prompt = list(range(30, 40))
    runner, arena, table = prefilled_in(bytearray(64 * 128), prompt)
    arena[table[2] * 128 + 8] ^= 1  # K of the last position, first head: the next entry's parent
    runner.execute(StepPlan(2, rows=(RowStep(0, 10, (7,), 3, ((),)),))).result()
    damaged = int(runner.states([0], [11])[0])
    arena[table[2] * 128 + 8] ^= 1
    healed = int(runner.states([0], [11])[0])
    expected = WitnessOracle(CONFIG).state([*prompt, 7])
    assert damaged != expected and healed != expected


def test_swapped_blocks_and_swapped_heads_are_noticed() -> None:
    prompt = list(range(12))
    runner, arena, table = prefilled_in(bytearray(64 * 128), prompt)
    state = int(runner.states([0], [12])[0])
    first, second = (slice(b * 128, b * 128 + 128) for b in table[:2])
    arena[first], arena[second] = arena[second], arena[first]
    assert int(runner.states([0], [12])[0]) != state
    arena[first], arena[second] = arena[second], arena[first]
    block = arena[first]
    arena[first] = block[64:] + block[:64]
    assert int(runner.states([0], [12])[0]) != state


def test_every_bit_of_an_embedding_counts() -> None:
    prompt = [1, 2, *[CONFIG.image_token_id] * 4, 3]
    media = [(2, 4, b"a picture")]
    driver = Driver(CONFIG, one_group(CONFIG, 4), random.Random(1))
    driver.run([Job(prompt, GREEDY, media)])
    clean = WitnessOracle(CONFIG).state(prompt, media)
    assert int(driver.runner.states([0], [7])[0]) == clean
    seen = {clean}
    step = RowStep(0, 0, tuple(prompt), 0, ((1, 2),))
    valid = {at for row in range(4) for at in range(*row_span(driver, row))}
    spare = [at for at in range(len(driver.ec)) if at not in valid]
    for at in [*valid, *random.Random(2).sample(spare, 200)]:
        driver.ec[at] ^= 1 << (at % 8)
        driver.runner.execute(StepPlan(9, rows=(step,))).result()
        state = int(driver.runner.states([0], [7])[0])
        assert (state not in seen) == (at in valid)
        seen.add(state)
        driver.ec[at] ^= 1 << (at % 8)


def row_span(driver: Driver, row: int) -> tuple[int, int]:
    """Where row ``row`` of the driver's only media item lies: its blocks were the first ones taken."""
    blocks = [b for b in range(64) if b not in driver.free_ec]
    wanted = WitnessOracle(CONFIG).embedding_rows(b"a picture", 4)[row]
    (start,) = (
        at
        for b in blocks
        for at in range(b * 3 * CONFIG.row_bytes, (b + 1) * 3 * CONFIG.row_bytes, CONFIG.row_bytes)
        if driver.ec[at : at + CONFIG.row_bytes] == wanted
    )
    return start, start + CONFIG.row_bytes


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("seed", range(2))
def test_ranks_that_share_the_heads_answer_like_one(seed: int, tp_size: int) -> None:
    config = WitnessConfig(num_layers=3, num_kv_heads=4, eos_period=24)
    groups = (KVGroupSpec(1, 4, 1, "uint64"), KVGroupSpec(2, 4, 1, "uint64"))
    rnd = random.Random(f"ranks {seed} {tp_size}")
    jobs = [random_job(rnd) for _ in range(6)]
    driver = Driver(config, KVCacheSpec(8, groups), rnd, depth=2, tp_size=tp_size)
    assert_equals_oracle(config, jobs, driver.run(jobs))


def test_every_rank_counts_and_seals_its_heads_in_order() -> None:
    prompt, spec = list(range(30, 40)), one_group(CONFIG, 4)
    arenas = [bytearray(64 * 64) for _ in range(2)]
    runner = WitnessRunner(CONFIG, spec, [memoryview(arena) for arena in arenas], tp_size=2)
    new = NewRow(0, "r", 0, tuple(prompt), len(prompt), GREEDY)
    step = RowStep(0, 0, tuple(prompt), 0, ((3, 1, 2),))
    result = runner.execute(StepPlan(1, new_rows=(new,), rows=(step,), seals=(BlockSeal(0, 1),))).result()
    assert result.checksums == (tuple(xxhash.xxh3_64_intdigest(arena[64:128]) for arena in arenas),)
    state = WitnessOracle(CONFIG).state(prompt)
    assert int(runner.states([0], [10])[0]) == state
    for arena in arenas:
        arena[3 * 64] ^= 1
        assert int(runner.states([0], [10])[0]) != state
        arena[3 * 64] ^= 1


def test_memory_for_the_wrong_number_of_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="one memory"):
        WitnessRunner(CONFIG, one_group(CONFIG, 4), [memoryview(bytearray(128))], tp_size=2)


# --- plan and lifecycle ---------------------------------------------------------------------


def test_seals_carry_one_checksum_a_head_of_the_block_in_memory() -> None:
    runner, arena, table = prefilled_in(bytearray(64 * 128), list(range(8)))
    seals = (BlockSeal(0, table[1]), BlockSeal(0, table[0]))
    result = runner.execute(StepPlan(2, seals=seals)).result()
    assert result.checksums == tuple(
        tuple(xxhash.xxh3_64_intdigest(arena[b * 128 + h * 64 : b * 128 + h * 64 + 64]) for h in (0, 1))
        for b in (table[1], table[0])
    )


def test_a_seal_covers_what_its_own_step_wrote() -> None:
    runner, arena, table = prefilled_in(bytearray(64 * 128), list(range(7)))
    before = bytes(arena[table[1] * 128 : table[1] * 128 + 128])
    plan = StepPlan(2, rows=(RowStep(0, 7, (7,), 2, ((),)),), seals=(BlockSeal(0, table[1]),))
    sealed = runner.execute(plan).result().checksums[0]
    assert sealed != tuple(xxhash.xxh3_64_intdigest(before[at : at + 64]) for at in (0, 64))


def test_a_freed_row_can_be_used_anew_in_the_same_step() -> None:
    runner, _ = prefilled(list(range(9)))
    prompt = (1, 2, 3)
    plan = StepPlan(
        2, (0,), (NewRow(0, "s", 0, prompt, 3, GREEDY),), (), (RowStep(0, 0, prompt, 0, ((9,),), (0,)),)
    )
    first = runner.execute(plan).result().token_ids[0]
    assert first == WitnessOracle(CONFIG).generate(prompt, GREEDY).token_ids[0]


def test_closing_twice_gives_the_memory_back() -> None:
    arena = bytearray(64 * 128)
    runner, _, _ = prefilled_in(arena, list(range(9)))
    with pytest.raises(BufferError):
        arena.append(0)
    runner.close()
    runner.close()
    arena.append(0)  # no view is left


def test_runner_oracle_and_sampling_need_no_torch_and_the_oracle_no_runner() -> None:
    code = (
        "import sys, shared.runner.witness_oracle\n"
        "bad = ('shared.runner.base', 'shared.runner.witness', 'shared.kv_cache', 'torch')\n"
        "assert not set(bad) & set(sys.modules), sys.modules.keys()\n"
        "import shared.runner.witness\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
