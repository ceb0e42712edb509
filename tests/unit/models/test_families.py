"""Every supported family against transformers: logits of tiny random models, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.kernels.batch import PagedKV
from shared.models import weights
from shared.models.decoder import Decoder
from shared.models.registry import load_config
from tests.unit.models.tiny import FAMILIES, reference_model, save

BLOCK = 4


def _decoder(model_dir: Path, cache: Path, num_rows: int = 2) -> Decoder:
    config = load_config(model_dir)
    group = config.kv_cache_spec(BLOCK).groups[0]
    blocks = 32
    data = torch.full(
        (num_rows * blocks, group.num_kv_heads, group.num_layers, 2, BLOCK, group.head_dim), float("nan")
    )
    tables = torch.randperm(num_rows * blocks).view(num_rows, blocks).int()
    kv = PagedKV(data, tables, group.window)
    return Decoder(config, weights.load(weights.prepare(model_dir, cache), config), [kv])


def _run(decoder: Decoder, chunks: list[tuple[int, int, list[int]]]) -> torch.Tensor:
    """One step of (row, first position, tokens) chunks; logits of every token."""
    x = decoder.embed(torch.tensor([t for _, _, tokens in chunks for t in tokens]))
    rows = [row for row, _, tokens in chunks for _ in tokens]
    positions = [first + i for _, first, tokens in chunks for i in range(len(tokens))]
    starts = [0]
    for _, _, tokens in chunks:
        starts.append(starts[-1] + len(tokens))
    decoder.forward(
        x,
        torch.tensor(rows, dtype=torch.int32),
        torch.tensor(positions, dtype=torch.int32),
        tuple(starts),
    )
    return decoder.logits(x)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    model = reference_model(family)
    decoder = _decoder(save(model, tmp_path / "model"), tmp_path)
    torch.manual_seed(1)
    a, b = torch.randint(0, 120, (50,)).tolist(), torch.randint(0, 120, (23,)).tolist()
    with torch.inference_mode():
        expected_a, expected_b = (model(torch.tensor([ids])).logits[0] for ids in (a, b))
        got = [
            _run(decoder, [(0, 0, a[:20])]),
            _run(decoder, [(1, 0, b[:10]), (0, 20, a[20:49])]),
            _run(decoder, [(0, 49, a[49:]), (1, 10, b[10:])]),
        ]
    torch.testing.assert_close(torch.cat((got[0], got[1][10:], got[2][:1])), expected_a, rtol=0, atol=1e-4)
    torch.testing.assert_close(torch.cat((got[1][:10], got[2][1:])), expected_b, rtol=0, atol=1e-4)


def test_bfloat16_checkpoints_are_computed_in_float32(tmp_path: Path) -> None:
    import transformers

    path = save(reference_model("llama"), tmp_path / "model", torch.bfloat16)
    model = transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    decoder = _decoder(path, tmp_path)
    ids = list(range(30))
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(_run(decoder, [(0, 0, ids)]), expected, rtol=0, atol=1e-4)
