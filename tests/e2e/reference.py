"""What transformers says in float32: greedy tokens and log-probabilities; and how answers compare with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

TOP = 20
TOLERANCE = 1e-4
#: More than are compared: near ties may swap places at the end of the list.
_KEPT = 2 * TOP


class Step(NamedTuple):
    """One position: the likeliest id, and the log-probabilities of the likeliest ids, likeliest first."""

    token_id: int
    logprobs: Mapping[int, float]


class Answer(NamedTuple):
    """What was served for one prompt: ids, each one's log-probability, and those of the top alternatives."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tops: tuple[Mapping[int, float], ...]
    cached_tokens: int = 0


class Verdict(NamedTuple):
    """``problem`` is "" when the answer is the reference's."""

    num_tokens: int
    max_difference: float
    problem: str = ""


def compute(
    model_dir: Path, prompts: Sequence[Sequence[int]], drafts: Sequence[Sequence[int]]
) -> list[list[Step]]:
    """Greedy decoding by transformers of as many tokens as each draft has, ends of sequence ignored.

    A draft is a guess that makes it quicker, whatever it holds: a token stays only if it is the model's own
    choice after the tokens before it, so the result is that of decoding one token at a time.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [_greedy(model, list(p), list(d)) for p, d in zip(prompts, drafts, strict=True)]


def _greedy(model: Any, prompt: list[int], tokens: list[int]) -> list[Step]:
    while True:
        ids = torch.tensor([prompt + tokens[:-1]])
        logits_NV = model(ids, use_cache=False, logits_to_keep=len(tokens)).logits[0]
        chosen = logits_NV.argmax(-1).tolist()
        wrong = next((i for i, token in enumerate(tokens) if token != chosen[i]), None)
        if wrong is None:
            break
        tokens[wrong] = chosen[wrong]
    values_NK, ids_NK = torch.log_softmax(logits_NV.double(), -1).topk(_KEPT)
    return [
        Step(token, dict(zip(top, values, strict=True)))
        for token, top, values in zip(tokens, ids_NK.tolist(), values_NK.tolist(), strict=True)
    ]


def compare(reference: Sequence[Step], answer: Answer, vocab_size: int) -> Verdict:
    """The same tokens, and at each of them the same top log-probabilities."""
    count = 0
    worst = 0.0
    for index, step in enumerate(reference):
        if index >= len(answer.token_ids):
            return Verdict(count, worst, f"only {index} tokens of {len(reference)}")
        if answer.token_ids[index] != step.token_id:
            return Verdict(count, worst, f"token {index} is {answer.token_ids[index]}, not {step.token_id}")
        difference, problem = _compare_step(step, answer.logprobs[index], answer.tops[index], vocab_size)
        worst = max(worst, difference)
        if problem:
            return Verdict(count, worst, f"token {index}: {problem}")
        count += 1
    if len(answer.token_ids) > len(reference):
        return Verdict(count, worst, f"{len(answer.token_ids)} tokens, {len(reference)} were asked for")
    return Verdict(count, worst)


def _compare_step(step: Step, logprob: float, top: Mapping[int, float], vocab_size: int) -> tuple[float, str]:
    if len(top) != TOP:
        return 0.0, f"{len(top)} alternatives, not {TOP}"
    if max(top) >= vocab_size:
        return 0.0, f"id {max(top)} is a padding row"
    strangers = top.keys() - step.logprobs.keys()
    if strangers:
        return 0.0, f"{sorted(strangers)} are not among the likeliest"
    differences = [abs(value - step.logprobs[token_id]) for token_id, value in top.items()]
    # In order of likelihood too: so nothing likelier was left out.
    ours, theirs = sorted(top.values(), reverse=True), list(step.logprobs.values())[:TOP]
    differences += [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    differences.append(abs(logprob - step.logprobs[step.token_id]))
    worst = max(differences)
    return worst, "" if worst <= TOLERANCE else f"log-probabilities differ by {worst:.1e}"
