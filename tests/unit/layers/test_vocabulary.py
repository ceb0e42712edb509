"""Embedding rows and logits: padding rows take no part."""

from __future__ import annotations

import torch

from shared.kernels.norm import rms_norm_twin
from shared.layers.vocabulary import Vocabulary


def test_embeddings_are_fresh_float32_rows() -> None:
    table = torch.randn(10, 16).bfloat16()
    vocabulary = Vocabulary(table, table[:8], torch.ones(16), 1e-5)
    rows = vocabulary.embed(torch.tensor([9, 2]))
    assert torch.equal(rows, table[[9, 2]].float())
    before = table.clone()
    rows.zero_()
    assert torch.equal(table, before)


def test_embeddings_of_a_float32_table_are_fresh_too() -> None:
    table = torch.randn(10, 16)
    Vocabulary(table, table, torch.ones(16), 1e-5).embed(torch.arange(10)).zero_()
    assert table.any()


def test_logits_cover_the_valid_tokens_only() -> None:
    torch.manual_seed(0)
    table, norm = torch.randn(10, 16), torch.rand(16)
    x = torch.randn(3, 16)
    logits = Vocabulary(table, table[:8], norm, 1e-5).logits(x)
    assert logits.shape == (3, 8)
    torch.testing.assert_close(logits, rms_norm_twin(x, norm, 1e-5) @ table[:8].T, rtol=1e-4, atol=1e-5)
