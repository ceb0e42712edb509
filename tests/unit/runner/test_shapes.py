"""The demo model answers the golden pictures exactly as the reference did, token for token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from tokenizers import Tokenizer

from shared.runner.encoder_runner import VisionEncoderRunner
from shared.runner.kv_tensors import EmbeddingMemory
from shared.step import EncodeItem, EncodePlan, MediaRows
from shared.types.request import MediaItem
from tests.unit.runner.driving import Driver

IMAGE_TOKEN, ROWS, SIDE = 49152, 64, 128
ROWS_PER_BLOCK = 20  # does not divide the 64 rows of a picture
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def _prompt(tokenizer: Tokenizer, question: str) -> tuple[list[int], int]:
    """Token ids of a picture question, and where the picture's placeholders begin."""

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    before = ids(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n")
    after = ids(question) + ids("<|im_end|>\n<|im_start|>assistant\n")
    return before + [IMAGE_TOKEN] * ROWS + after, len(before)


def _item(path: Path, index: int) -> EncodeItem:
    with Image.open(path) as image:
        pixels = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC).tobytes()
    blocks = tuple(range(4 * index + 3, 4 * index - 1, -1))
    return EncodeItem(f"h{index}", pixels, (SIDE, SIDE, 3), ROWS, blocks)


@pytest.mark.slow
def test_all_golden_pictures(demo_model: Path, weights_cache: Path, repo_root: Path) -> None:
    folder = repo_root / "tests/golden/shapes"
    cases = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    row_bytes = 4 * 576
    memory = bytearray(b"\xff" * (4 * len(cases) * ROWS_PER_BLOCK * row_bytes))
    embeddings = EmbeddingMemory(memoryview(memory), ROWS_PER_BLOCK, row_bytes)
    encoder = VisionEncoderRunner(demo_model, embeddings)
    items = [_item(folder / case["image"], i) for i, case in enumerate(cases)]
    checksums = encoder.execute(EncodePlan(1, tuple(items))).checksums
    assert len(set(checksums)) == len(cases)

    driver = Driver.of(demo_model, weights_cache, max_rows=len(cases), max_len=128, embeddings=embeddings)
    positions, answers = {}, {}
    for row, case in enumerate(cases):
        prompt, offset = _prompt(tokenizer, case["question"])
        assert len(prompt) == case["prompt_tokens"]
        media = (MediaRows(MediaItem(f"h{row}", offset, ROWS), items[row].block_ids),)
        # Chunks cut the picture at different places in different rows.
        result = driver.prefill(row, prompt, chunk=30 + 3 * row, media=media)
        answers[row] = list(result.token_ids)
        positions[row] = len(prompt)
    for _ in range(max(len(case["reference_token_ids"]) for case in cases) - 1):
        going = {r: p for r, p in positions.items() if answers[r][-1] not in driver.config.eos_token_ids}
        result = driver.decode(going)
        for row, token in zip(result.rows, result.token_ids, strict=True):
            answers[row].append(token)
            positions[row] += 1
    driver.close()
    encoder.close()
    assert answers == {row: case["reference_token_ids"] for row, case in enumerate(cases)}
