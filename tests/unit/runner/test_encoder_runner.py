"""The vision encoder against transformers' own model; packing, checksums, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shared.errors import ConfigError, InvalidMedia
from shared.kernels.checksum import checksum
from shared.models.tensor_file import write_tensors
from shared.runner.encoder_runner import VisionEncoderRunner
from shared.runner.kv_tensors import EmbeddingMemory
from shared.step import EncodeItem, EncodePlan

CONFIG = {
    "model_type": "smolvlm",
    "image_token_id": 60,
    "scale_factor": 2,
    "text_config": {
        "model_type": "llama",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 64,
        "pad_token_id": 1,
    },
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
    },
}
SETTINGS = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2]}
ROWS, ROW_BYTES, PER_BLOCK = 4, 64, 3


@pytest.fixture(scope="module")
def reference():
    """transformers' whole model, random."""
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

    torch.manual_seed(0)
    return SmolVLMForConditionalGeneration(SmolVLMConfig(**CONFIG)).float().eval()


@pytest.fixture(scope="module")
def model_dir(reference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vlm")
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    state = {k: v for k, v in reference.state_dict().items() if "vision_model" in k or "connector" in k}
    write_tensors(path / "model.safetensors", {k: (torch.float32, [v]) for k, v in state.items()})
    return path


@pytest.fixture
def memory() -> EmbeddingMemory:
    return EmbeddingMemory(memoryview(bytearray(b"\xff" * (8 * PER_BLOCK * ROW_BYTES))), PER_BLOCK, ROW_BYTES)


def _item(
    seed: int, blocks: tuple[int, ...], shape: tuple[int, ...] = (16, 16, 3), rows: int = ROWS
) -> EncodeItem:
    torch.manual_seed(seed)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8)
    return EncodeItem(f"h{seed}", pixels.numpy().tobytes(), shape, rows, blocks)


def _expected(reference, item: EncodeItem) -> torch.Tensor:
    pixels = torch.frombuffer(bytearray(item.data), dtype=torch.uint8).view(-1, 16, 16, 3)
    normal = (pixels / 255.0 - torch.tensor(SETTINGS["image_mean"])) / torch.tensor(SETTINGS["image_std"])
    with torch.inference_mode():
        features = reference.get_image_features(normal.permute(0, 3, 1, 2)[None]).pooler_output
    return torch.cat(list(features))


def test_rows_equal_transformers_and_are_packed(reference, model_dir: Path, memory: EmbeddingMemory) -> None:
    runner = VisionEncoderRunner(model_dir, memory)
    items = (_item(1, (5, 2)), _item(2, (0, 7)), _item(3, (1, 3, 4), (2, 16, 16, 3), 2 * ROWS))
    result = runner.execute(EncodePlan(9, items))
    assert result.step_id == 9
    blocks = memory.tensor().view(8, PER_BLOCK, -1)
    for item, check in zip(items, result.checksums, strict=True):
        rows = blocks[list(item.block_ids)].flatten(0, 1)[: item.num_rows]
        torch.testing.assert_close(rows, _expected(reference, item), rtol=1e-4, atol=1e-5)
        assert check == checksum(rows.contiguous().numpy().tobytes())
    assert blocks[2, 1:].isnan().all()  # beyond the valid rows nothing is written
    assert blocks[6].isnan().all()
    runner.close()
    runner.close()


def test_a_picture_does_not_depend_on_its_neighbours(model_dir: Path, memory: EmbeddingMemory) -> None:
    runner = VisionEncoderRunner(model_dir, memory)
    alone = runner.execute(EncodePlan(1, (_item(1, (0, 1)),))).checksums
    both = runner.execute(EncodePlan(2, (_item(2, (2, 3)), _item(1, (6, 5))))).checksums
    assert both[1] == alone[0] != both[0]


@pytest.mark.parametrize(
    "item",
    [
        EncodeItem("h", b"\0" * 10, (16, 16, 3), ROWS, (0, 1)),
        EncodeItem("h", b"\0" * 256, (16, 16, 1), ROWS, (0, 1)),
        EncodeItem("h", b"", (0, 16, 3), ROWS, (0, 1)),
        _item(1, (0, 1), rows=ROWS + 1),
    ],
)
def test_pixels_that_do_not_fit_are_invalid_media(
    item: EncodeItem, model_dir: Path, memory: EmbeddingMemory
) -> None:
    with pytest.raises(InvalidMedia):
        VisionEncoderRunner(model_dir, memory).execute(EncodePlan(1, (item,)))
    assert memory.tensor().isnan().all()


def test_what_does_not_fit_is_refused(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="embedding rows"):
        VisionEncoderRunner(model_dir, EmbeddingMemory(memoryview(bytearray(96)), 1, 32))
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": "llama"}))
    memory = EmbeddingMemory(memoryview(bytearray(64)), 1, 64)
    with pytest.raises(ConfigError, match="smolvlm"):
        VisionEncoderRunner(tmp_path, memory)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ConfigError, match="preprocessor_config"):
        VisionEncoderRunner(tmp_path, memory)
