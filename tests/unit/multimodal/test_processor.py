from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ConfigError, InvalidRequest
from shared.multimodal.hashing import mm_hash
from shared.multimodal.processor import FixedSizeProcessor, NoImages, load_processor

SMOLVLM: dict[str, Any] = {
    "model_type": "smolvlm",
    "image_token_id": 900,
    "scale_factor": 2,
    "vision_config": {"image_size": 128, "patch_size": 8},
}
PREPROCESSOR: dict[str, Any] = {
    "size": [128, 128],
    "resample": "bicubic",
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "image_tokens": 64,
}
WITNESS = {
    "model_type": "witness",
    "image_token_id": 259,
    "processor": {"base_rows": 4, "tile": 64, "spread": 5, "image_token": "<|image|>"},
}


def write(folder: Path, config: object, preprocessor: object = PREPROCESSOR) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return folder


def test_a_fixed_size_model_gives_every_picture_the_same_rows(tmp_path: Path) -> None:
    processor = load_processor(write(tmp_path, SMOLVLM))
    assert isinstance(processor, FixedSizeProcessor)
    assert (processor.image_token_id, processor.size, processor.mean) == (900, (128, 128), (0.5, 0.5, 0.5))
    assert processor.num_rows(1, 1) == processor.num_rows(4000, 3) == 64
    as_object = {**PREPROCESSOR, "size": {"width": 128, "height": 128}, "resample": 3}
    assert load_processor(write(tmp_path, SMOLVLM, as_object)) == processor


def test_the_witness_varies_its_rows_with_the_size(tmp_path: Path) -> None:
    processor = load_processor(write(tmp_path, WITNESS))
    assert (processor.image_token_id, processor.size) == (259, None)
    assert [processor.num_rows(*size) for size in ((1, 1), (64, 1), (130, 64), (320, 63))] == [4, 5, 7, 4]


def test_a_text_model_takes_no_images(tmp_path: Path) -> None:
    processor = load_processor(write(tmp_path, {"model_type": "llama"}))
    assert processor == NoImages()
    with pytest.raises(InvalidRequest):
        processor.num_rows(1, 1)


@pytest.mark.parametrize(
    ("config", "preprocessor"),
    [
        ({**SMOLVLM, "image_token_id": None}, PREPROCESSOR),
        ({**SMOLVLM, "vision_config": {}}, PREPROCESSOR),
        (SMOLVLM, {**PREPROCESSOR, "resample": "nearest"}),
        (SMOLVLM, {**PREPROCESSOR, "image_tokens": 65}),
        (SMOLVLM, {**PREPROCESSOR, "size": {"longest_edge": 5}}),
        (SMOLVLM, {"size": [1, 2]}),
        (SMOLVLM, {**PREPROCESSOR, "size": [100_000, 100_000]}),
        (SMOLVLM, {**PREPROCESSOR, "size": [128, 64]}),
        (
            {**SMOLVLM, "vision_config": {"image_size": 100_000, "patch_size": 8}},
            {**PREPROCESSOR, "size": [10**5] * 2},
        ),
        ({**SMOLVLM, "vision_config": {"image_size": 128, "patch_size": 0}}, PREPROCESSOR),
        ({**SMOLVLM, "image_token_id": -1}, PREPROCESSOR),
        (SMOLVLM, {**PREPROCESSOR, "image_std": [0, 0, 0]}),
        (SMOLVLM, {**PREPROCESSOR, "image_std": [0.5, 0.5]}),
        (SMOLVLM, {**PREPROCESSOR, "image_std": [0.5, 0.5, 1e-300]}),
        (SMOLVLM, {**PREPROCESSOR, "image_mean": [0.5, float("nan"), 0.5]}),
        (SMOLVLM, {**PREPROCESSOR, "image_mean": [float("inf")] * 3}),
        ({**WITNESS, "image_token_id": "x"}, {}),
        ({"model_type": "witness"}, {}),
        ([], {}),
    ],
)
def test_incomplete_settings_are_a_config_error(tmp_path: Path, config: object, preprocessor: object) -> None:
    with pytest.raises(ConfigError):
        load_processor(write(tmp_path, config, preprocessor))


def test_versions_tell_settings_apart(tmp_path: Path) -> None:
    base = load_processor(write(tmp_path, SMOLVLM)).version
    changed = {**PREPROCESSOR, "image_mean": [0.4, 0.5, 0.5]}
    assert load_processor(write(tmp_path, SMOLVLM, changed)).version != base


def test_a_media_hash_depends_on_every_field_alone() -> None:
    base = mm_hash(b"ab", processor_version="c", decode_options="d", salt="e")
    assert base == mm_hash(b"ab", processor_version="c", decode_options="d", salt="e")
    assert len(base) == 64
    others = [
        mm_hash(b"a", processor_version="cb", decode_options="d", salt="e"),
        mm_hash(b"ab", processor_version="cd", decode_options="", salt="e"),
        mm_hash(b"ab", processor_version="c", decode_options="de", salt=""),
        mm_hash(b"eab", processor_version="c", decode_options="d", salt=""),
        mm_hash(b"ac", processor_version="c", decode_options="d", salt="e"),
    ]
    assert len({base, *others}) == 6
