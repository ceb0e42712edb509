"""Embedding rows and likeliest tokens, with what the host does not know left on the device."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.gpu.tokens import FAILED, embed, embed_twin, likeliest, likeliest_twin

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def test_unknown_tokens_are_those_that_were_sampled_last() -> None:
    table = torch.randn(50, 24, device=DEVICE)
    last = ints(7, 9, FAILED)
    tokens, rows = ints(3, -1, -1, -1, 49), ints(0, 1, 0, 2, 2)
    got = embed(tokens, rows, last, table)
    assert torch.equal(got, table[[3, 9, 7, 0, 49]])
    assert torch.equal(got, embed_twin(tokens, rows, last, table))


@pytest.mark.parametrize("vocabulary", [10, 4096, 9001])
def test_the_lowest_id_of_the_largest_logit(vocabulary: int) -> None:
    torch.manual_seed(vocabulary)
    logits = torch.randint(-3, 4, (5, vocabulary), device=DEVICE).float()
    logits[1] = -torch.inf
    logits[1, vocabulary - 1] = -7.0
    last, rows = ints(*[99] * 6), ints(5, 0, -1, 2, 1)
    ours, theirs = last.clone(), last.clone()
    got = likeliest(logits, rows, ours)
    assert torch.equal(got, likeliest_twin(logits, rows, theirs))
    assert torch.equal(ours, theirs)
    assert ours.tolist() == [got[1], got[4], got[3], 99, 99, got[0]]
    assert got[1] == vocabulary - 1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_not_finite_name_no_token(bad: float) -> None:
    logits = torch.randn(3, 5000, device=DEVICE)
    if bad == -torch.inf:
        logits[1] = bad
    else:
        logits[1, 4500] = bad
    last = ints(1, 2, 3)
    got = likeliest(logits, ints(0, 1, 2), last)
    assert got[1] == FAILED and last[1] == FAILED
    assert got[0] >= 0 and got[2] >= 0
    assert torch.equal(got, likeliest_twin(logits, ints(0, 1, 2), last.clone()))


def test_rows_of_a_wider_matrix() -> None:
    wide = torch.randn(4, 300, device=DEVICE)
    got = likeliest(wide[:, :200], ints(0, 1, 2, 3), ints(0, 0, 0, 0))
    assert got.tolist() == wide[:, :200].argmax(1).tolist()
