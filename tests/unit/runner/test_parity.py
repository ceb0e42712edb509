"""SmolLM2 against transformers in float32: the same greedy tokens and top-20 log-probabilities,
alone, batched and chunked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from shared.step import RowStep, StepResult
from shared.types.request import SamplingParams, TokenLogprobs
from tests.unit.runner.driving import Driver

NUM_TOKENS, TOP = 12, 20
# As the reference: no answer ends early.
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS, temperature=0.0, logprobs=TOP)
TEXTS = [
    "A lighthouse keeper wrote one line in the book every night for forty years, and on the last night she "
    "wrote that the sea had been a patient listener, because in all those years it had never once",
    "To bake bread you need flour, water, salt and yeast. Mix them, wait an hour, fold the dough, wait, "
    "heat the oven as hot as it will go, and then bake the loaf until the crust is",
    "def is_prime(n):\n    if n < 2:\n        return False\n    i = 2\n    while i * i <= n:\n"
    "        if n % i == 0:\n            return False\n        i += 1\n    return True\n\n"
    "def primes_below(limit):\n    return",
    "The water cycle has three main parts. First, the sun warms the oceans and water evaporates. Second, the "
    "vapour rises, cools and forms clouds. Third, the drops grow heavy and fall back to the ground as",
    "Question: A train leaves at 9:15 and arrives at 11:45. It stops for 10 minutes on the way. For how long "
    "was it moving? Answer: The whole journey takes 2 hours and 30 minutes, so it was moving for",
    "<|im_start|>user\nName three animals that live in the desert and say in one sentence each how they live "
    "without much water. Keep the answer short and friendly.<|im_end|>\n<|im_start|>assistant\n",
]


class Reference:
    """What transformers says: per prompt its greedy tokens and the full log-probabilities at each."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self.prompts = [list(tokenizer.encode(text).ids) for text in TEXTS]
        self.tokens: list[list[int]] = []
        self.logprobs: list[torch.Tensor] = []
        for prompt in self.prompts:
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
            self.tokens.append(out.sequences[0, len(prompt) :].tolist())
            self.logprobs.append(torch.log_softmax(torch.cat(out.logits).double(), -1))


@pytest.fixture(scope="module")
def reference(text_model: Path) -> Reference:
    return Reference(text_model)


@pytest.fixture
def driver(text_model: Path, weights_cache: Path):
    driver = Driver.of(text_model, weights_cache, max_rows=len(TEXTS), max_len=128)
    yield driver
    driver.close()


class Answers:
    """Collects step results by row."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}

    def add(self, result: StepResult) -> None:
        assert not result.failed_rows
        for row, token, logprobs in zip(result.rows, result.token_ids, result.logprobs, strict=True):
            assert logprobs is not None
            self.tokens.setdefault(row, []).append(token)
            self.logprobs.setdefault(row, []).append(logprobs)

    def check(self, reference: Reference) -> None:
        assert [self.tokens[row] for row in range(len(TEXTS))] == reference.tokens
        for row, expected in enumerate(reference.logprobs):
            for step, got in enumerate(self.logprobs[row]):
                at = expected[step]
                assert abs(got.logprob - float(at[self.tokens[row][step]])) < 1e-4
                top = torch.topk(at, TOP).values
                mine = torch.tensor(got.top_logprobs, dtype=torch.float64)
                torch.testing.assert_close(mine, top, rtol=0, atol=1e-4)
                torch.testing.assert_close(at[list(got.top_ids)], mine, rtol=0, atol=1e-4)


def _decode(driver: Driver, prompts: list[list[int]], rows: list[int], answers: Answers) -> None:
    for step in range(NUM_TOKENS - 1):
        answers.add(driver.decode({row: len(prompts[row]) + step for row in rows}))


@pytest.mark.slow
def test_alone(driver: Driver, reference: Reference) -> None:
    answers = Answers()
    for row, prompt in enumerate(reference.prompts):
        assert len(prompt) >= 3 * driver.spec.block_size - 16
        answers.add(driver.prefill(row, prompt, sampling=PARAMS))
        _decode(driver, reference.prompts, [row], answers)
    answers.check(reference)


@pytest.mark.slow
def test_batched(driver: Driver, reference: Reference) -> None:
    """All prompts in one step, then all rows decode together."""
    answers = Answers()
    rows = list(range(len(TEXTS)))
    answers.add(
        driver.step(
            new_rows=tuple(driver.new_row(row, reference.prompts[row], PARAMS) for row in rows),
            rows=tuple(driver.chunk(row, p, 0, len(p), row) for row, p in enumerate(reference.prompts)),
        )
    )
    _decode(driver, reference.prompts, rows, answers)
    answers.check(reference)


@pytest.mark.slow
def test_chunked_beside_decoding_rows(driver: Driver, reference: Reference) -> None:
    """Prompts come in chunks of 17 tokens, each beside the rows that decode already."""
    answers, positions = Answers(), {}
    for row, prompt in enumerate(reference.prompts):
        for first in range(0, len(prompt), 17):
            last = min(first + 17, len(prompt))
            others = [r for r in positions if len(answers.tokens[r]) < NUM_TOKENS]
            answers.add(
                driver.step(
                    new_rows=(driver.new_row(row, prompt, PARAMS),) if first == 0 else (),
                    rows=(
                        *(RowStep(r, positions[r], (-1,), 0, ((),), (r,)) for r in others),
                        driver.chunk(row, prompt, first, last, *((row,) if last == len(prompt) else ())),
                    ),
                )
            )
            for r in others:
                positions[r] += 1
        positions[row] = len(prompt)
    while going := {r: p for r, p in positions.items() if len(answers.tokens[r]) < NUM_TOKENS}:
        answers.add(driver.decode(going))
        for r in going:
            positions[r] += 1
    answers.check(reference)
