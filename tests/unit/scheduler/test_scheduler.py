"""The token scheduler against a runner whose tokens depend on every byte of paged memory."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.live import sequences_of
from shared.errors import InvalidRequest
from shared.kv_cache.block_hash import BlockHasher
from shared.kv_cache.manager import KVCacheManager
from shared.scheduler.scheduler import Outcome, Scheduler, SchedulerLimits
from shared.scheduler.sequence import Sequence
from shared.types.identity import IdentityKey
from shared.types.kv import KVCacheSpec, KVGroupSpec
from shared.types.request import GenerationRequest, MediaItem, SamplingParams
from shared.types.worker import AGGREGATED, DECODE, PREFILL
from tests.fakes.sum_runner import SumRunner, expected_tokens

BLOCK = 4


class Worker:
    """Scheduler, bookkeeping and runner, driven step by step with the overlap of the real loop."""

    def __init__(self, num_blocks: int = 64, budget: int = 8, rows: int = 8, max_len: int = 256) -> None:
        spec = KVCacheSpec(BLOCK, (KVGroupSpec(1, 1, 1, "uint64"),))
        hasher = BlockHasher(IdentityKey("m", "r", "t", "uint64"), BLOCK)
        self.kv = KVCacheManager(spec, [num_blocks], hasher)
        self.runner = SumRunner(BLOCK)
        self.scheduler = Scheduler(SchedulerLimits(budget, rows, max_len), self.kv, frozenset())
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.reasons: dict[tuple[str, int], str] = {}
        self.lost: list[Outcome] = []
        self._arrivals = 0
        self._flying = None

    def add(self, request: GenerationRequest, mode: str = AGGREGATED) -> dict[int, Sequence]:
        self._arrivals += 1
        sequences = sequences_of(request, mode, self._arrivals)
        self.scheduler.add(sequences[request.choices[0]])
        return sequences

    def turn(self) -> bool:
        """One turn of the overlapped loop; False when nothing is left to do."""
        self.lost += self.scheduler.take_lost()
        step = self.scheduler.schedule()
        launched = (step, self.runner.execute(step.plan)) if step else None
        finished = self._flying
        if finished:
            scheduled, pending = finished
            for outcome in self.scheduler.update(scheduled, pending.result()):
                self._note(outcome)
        self._flying = launched
        self.kv.check_integrity()
        return launched is not None or finished is not None

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.turn():
                return
        raise AssertionError("the scheduler never came to rest")

    def _note(self, outcome: Outcome) -> None:
        if outcome.token_id is not None:
            key = (outcome.sequence.request.request_id, outcome.sequence.choice)
            self.tokens[key].append(outcome.token_id)
            if outcome.sequence.finish_reason:
                self.reasons[key] = outcome.sequence.finish_reason


def request(name: str, prompt: list[int], max_tokens: int = 6, **fields) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens, **fields.pop("sampling", {}))
    return GenerationRequest(name, "m", tuple(prompt), len(prompt), sampling, **fields)


def test_one_request_is_computed_in_chunks_and_finishes_by_length() -> None:
    worker = Worker(budget=5)
    prompt = list(range(1, 18))
    worker.add(request("a", prompt))
    worker.run()
    assert worker.tokens["a", 0] == expected_tokens(prompt, 6)
    assert worker.reasons["a", 0] == "length"
    assert max(len(row.token_ids) for plan in worker.runner.plans for row in plan.rows) == 5
    assert worker.kv.num_used() == 0


def test_a_budget_is_never_exceeded_and_decodes_go_before_a_long_prompt() -> None:
    worker = Worker(budget=6)
    worker.add(request("short", [5], max_tokens=20))
    worker.turn()
    worker.add(request("long", list(range(1, 60))))
    worker.run()
    for plan in worker.runner.plans:
        assert sum(len(row.token_ids) for row in plan.rows) <= 6
    chunks = [plan for plan in worker.runner.plans if any(len(row.token_ids) > 1 for row in plan.rows)]
    assert any(len(plan.rows) == 2 for plan in chunks), "the stream stood still beside the prompt"
    assert worker.tokens["short", 0] == expected_tokens([5], 20)
    assert worker.tokens["long", 0] == expected_tokens(list(range(1, 60)), 6)


def test_choices_share_the_prompt_and_diverge_by_copy_on_write() -> None:
    worker = Worker()
    prompt = list(range(1, 11))
    worker.add(request("a", prompt, choices=(0, 1, 2)))
    worker.run()
    for choice in range(3):
        assert worker.tokens["a", choice] == expected_tokens(prompt, 6, choice)
    assert any(plan.copies for plan in worker.runner.plans)
    assert worker.kv.num_used() == 0


def test_the_source_of_a_copy_is_kept_until_the_copy_was_made() -> None:
    worker = Worker()
    sequences = worker.add(request("a", list(range(1, 11)), choices=(0, 1), max_tokens=4))
    while not any(plan.copies for plan in worker.runner.plans):
        worker.turn()
    source = worker.runner.plans[-1].copies[0].src
    for sequence in sequences.values():
        worker.scheduler.stop(sequence)
    assert worker.kv.pool(0).ref_count(source) > 0, "a transfer could land in it before the copy"
    worker.run()
    assert worker.kv.num_used() == 0


def test_choices_wait_for_their_prompt_while_it_is_computed_in_chunks() -> None:
    worker = Worker(budget=3)
    prompt = list(range(1, 12))
    worker.add(request("a", [7]))
    worker.turn()
    worker.add(request("b", prompt, choices=(0, 1)))
    worker.run()
    for choice in range(2):
        assert worker.tokens["b", choice] == expected_tokens(prompt, 6, choice)


def test_a_second_request_computes_only_what_the_prefix_cache_lacks() -> None:
    worker = Worker()
    prompt = list(range(1, 13))
    worker.add(request("a", prompt))
    worker.run()
    before = len(worker.runner.plans)
    second = worker.add(request("b", prompt))[0]
    worker.run()
    computed = sum(len(row.token_ids) for plan in worker.runner.plans[before:] for row in plan.rows)
    assert worker.tokens["b", 0] == worker.tokens["a", 0]
    assert second.num_cached == 8, "all full blocks but the one of the last token"
    assert computed <= 4 + 6 + 1


def test_preempted_requests_give_the_same_tokens_and_nothing_leaks() -> None:
    worker = Worker(num_blocks=12, rows=6)
    prompts = {f"r{i}": [i * 3 + 1, i + 2, 7, 9, 11] for i in range(5)}
    for name, prompt in prompts.items():
        worker.add(request(name, prompt, max_tokens=16))
    worker.run()
    assert worker.scheduler.num_preemptions > 0, "the test did not reach its subject"
    for name, prompt in prompts.items():
        assert worker.tokens[name, 0] == expected_tokens(prompt, 16)
    assert worker.kv.num_used() == 0


def test_a_sequence_that_cannot_be_recomputed_here_is_reported_lost_when_preempted() -> None:
    worker = Worker(num_blocks=6, rows=4)
    media = (MediaItem("aa", 0, 2),)
    first = worker.add(request("keep", [1, 2, 3, 4, 5], max_tokens=12))[0]
    other = worker.add(request("media", [9, 9, 3, 4, 5], max_tokens=12, media=media))[0]
    worker.run()
    assert [outcome.sequence for outcome in worker.lost] == [other]
    assert worker.lost[0].failed == "preempted"
    assert first.finish_reason == "length"
    assert worker.kv.num_used() == 0


def test_priority_goes_before_arrival() -> None:
    worker = Worker(rows=1)
    for name, priority in (("late", 5), ("soon", -1)):
        worker.add(request(name, [3, 4], max_tokens=2, priority=priority))
    worker.run()
    first = worker.runner.plans[0].new_rows[0].request_id
    assert first == "soon"


def test_a_stop_token_ends_the_answer_and_discards_the_step_in_flight() -> None:
    prompt = [1, 2, 3]
    stop = expected_tokens(prompt, 3)[2]
    worker = Worker()
    worker.add(request("a", prompt, max_tokens=20, sampling={"stop_token_ids": (stop,)}))
    worker.run()
    assert worker.tokens["a", 0] == expected_tokens(prompt, 3)
    assert worker.reasons["a", 0] == "stop"
    assert worker.kv.num_used() == 0


@pytest.mark.parametrize("turns", range(8))
def test_stopping_at_any_turn_gives_everything_back(turns: int) -> None:
    worker = Worker(budget=3)
    sequences = worker.add(request("a", list(range(1, 10)), choices=(0, 1), max_tokens=5))
    for _ in range(turns):
        worker.turn()
    for sequence in sequences.values():
        worker.scheduler.stop(sequence)
    worker.run()
    assert worker.kv.num_used() == 0
    assert worker.scheduler.num_running == 0
    worker.add(request("b", [4, 5, 6]))
    worker.run()
    assert worker.tokens["b", 0] == expected_tokens([4, 5, 6], 6)


def test_prefill_keeps_its_blocks_for_the_handoff_with_a_sealed_tail() -> None:
    worker = Worker()
    prompt = list(range(1, 11))
    sequence = worker.add(request("a", prompt), PREFILL)[0]
    worker.run()
    assert worker.tokens["a", 0] == expected_tokens(prompt, 1)
    assert sequence.row == -1 and sequence.kv_open
    refs = worker.kv.committed(sequence.key, 0, 0, 3)
    assert [len(ref.checksums) for ref in refs] == [1, 1, 1]
    worker.kv.close(sequence.key)
    assert worker.kv.num_used() == 0


def receive(worker: Worker, name: str, prompt: list[int]) -> Sequence:
    """A sequence that comes with its prompt's blocks, as from a handoff; its KV counts as not computed."""
    sequence = Sequence(request(name, prompt), 0, DECODE, len(name))
    worker.kv.open(sequence.key, prompt, (), "", "", 0)
    worker.kv.reserve(sequence.key, len(prompt), writable_from=0)
    sequence.kv_open = True
    worker.scheduler.add(sequence)
    return sequence


def test_sequences_that_wait_with_all_the_blocks_do_not_stop_each_other() -> None:
    worker = Worker(num_blocks=8)
    prompts = {name: list(range(1, 17)) for name in ("a", "bb")}
    for name, prompt in prompts.items():
        receive(worker, name, prompt)
    assert worker.kv.num_free() == 0
    worker.run()
    for name, prompt in prompts.items():
        assert worker.tokens[name, 0] == expected_tokens(prompt, 6)
    assert worker.kv.num_used() == 0


def test_one_that_runs_takes_blocks_from_one_that_only_waits_before_it_gives_up_its_own() -> None:
    worker = Worker(num_blocks=6, rows=1)
    first = worker.add(request("a", [1, 2, 3], max_tokens=12))[0]
    worker.turn()
    waiting = receive(worker, "late", list(range(1, 17)))
    worker.run()
    assert (first.preemptions, waiting.preemptions) == (0, 1)
    assert worker.tokens["a", 0] == expected_tokens([1, 2, 3], 12)
    assert worker.tokens["late", 0] == expected_tokens(list(range(1, 17)), 6)
    assert worker.kv.num_used() == 0


def test_a_choice_stopped_before_its_request_runs_takes_no_row() -> None:
    worker = Worker(rows=3)
    sequences = worker.add(request("a", [1, 2, 3], choices=(0, 1)))
    worker.scheduler.stop(sequences[1])
    worker.run()
    assert worker.tokens["a", 0] == expected_tokens([1, 2, 3], 6)
    assert worker.scheduler.num_running == 0
    worker.add(request("b", [1, 2, 3], choices=(0, 1, 2)))
    worker.run()
    assert worker.tokens["b", 2] == expected_tokens([1, 2, 3], 6, 2)


def test_more_choices_than_rows_is_refused() -> None:
    worker = Worker(rows=2)
    with pytest.raises(InvalidRequest):
        worker.add(request("a", [1], choices=(0, 1, 2)))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_mix_of_requests_gives_each_its_own_tokens(data: st.DataObject) -> None:
    worker = Worker(
        num_blocks=data.draw(st.integers(16, 40)),
        budget=data.draw(st.integers(1, 12)),
        rows=data.draw(st.integers(3, 8)),
    )
    shared_prefix = list(range(1, 10))
    wanted = {}
    for i in range(data.draw(st.integers(1, 8))):
        prompt = shared_prefix[: data.draw(st.integers(0, 9))] + [
            data.draw(st.integers(1, 50)) for _ in range(data.draw(st.integers(1, 12)))
        ]
        choices = tuple(range(data.draw(st.integers(1, 3))))
        count = data.draw(st.integers(1, 10))
        worker.add(request(f"r{i}", prompt, max_tokens=count, choices=choices))
        for choice in choices:
            wanted[f"r{i}", choice] = expected_tokens(prompt, count, choice)
        for _ in range(data.draw(st.integers(0, 4))):
            worker.turn()
    worker.run()
    assert dict(worker.tokens) == wanted
    assert worker.kv.num_used() == 0


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_stopping_some_changes_nothing_for_the_others(data: st.DataObject) -> None:
    worker = Worker(
        num_blocks=data.draw(st.integers(12, 30)),
        budget=data.draw(st.integers(1, 10)),
        rows=data.draw(st.integers(3, 8)),
    )
    wanted = {}
    alive: dict[tuple[str, int], Sequence] = {}
    for i in range(data.draw(st.integers(2, 7))):
        prompt = [data.draw(st.integers(1, 9)) for _ in range(data.draw(st.integers(1, 14)))]
        choices = tuple(range(data.draw(st.integers(1, 3))))
        count = data.draw(st.integers(1, 10))
        for choice, sequence in worker.add(
            request(f"r{i}", prompt, max_tokens=count, choices=choices)
        ).items():
            alive[f"r{i}", choice] = sequence
            wanted[f"r{i}", choice] = expected_tokens(prompt, count, choice)
        for _ in range(data.draw(st.integers(0, 5))):
            worker.turn()
        if data.draw(st.booleans()):
            name = f"r{data.draw(st.integers(0, i))}"
            for key in [key for key in alive if key[0] == name]:
                worker.scheduler.stop(alive.pop(key))
    worker.run()
    for key in alive:
        assert worker.tokens[key] == wanted[key]
    assert worker.kv.num_used() == 0
    assert worker.scheduler.num_running == worker.scheduler.num_waiting == 0
