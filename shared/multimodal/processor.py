"""How a model takes pictures: owns placeholder counts and decode options; not pixels or tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from shared.errors import ConfigError, InvalidRequest

#: Most pixels of a side of the square that a vision tower takes.
MAX_SIDE = 8192
#: Means and deviations of colours lie well within: float32 must be able to divide by them.
_MIN_STD, _MAX_COLOUR = 1e-3, 1e3


class ImageProcessor(Protocol):
    """What router and encoder must agree on about one model's pictures. Immutable.

    ``image_token_id`` is the placeholder's id, None for a model without pictures; ``version`` names
    everything that decides the embeddings beside bytes and weights; ``size`` is (width, height) to
    decode to, None where the encoder takes the encoded bytes as they are.
    """

    @property
    def image_token_id(self) -> int | None: ...

    @property
    def version(self) -> str: ...

    @property
    def size(self) -> tuple[int, int] | None: ...

    def num_rows(self, width: int, height: int) -> int:
        """Embedding rows (= placeholder tokens) of a picture of this size in pixels."""
        ...


class NoImages(Struct, frozen=True):
    """A model that takes text only."""

    image_token_id: None = None
    version: str = "none"
    size: None = None

    def num_rows(self, width: int, height: int) -> int:
        raise InvalidRequest("this model does not take images", param="messages")


class FixedSizeProcessor(Struct, frozen=True):
    """Every picture is resized to one size, so that all have equally many rows (SmolVLM family
    without tiling). Pixels are (value / 255 - mean) / std in RGB order."""

    image_token_id: int
    size: tuple[int, int]
    rows: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def version(self) -> str:
        return f"fixed-v1 {self.size} bicubic {self.mean} {self.std} {self.rows}"

    def num_rows(self, width: int, height: int) -> int:
        return self.rows


class WitnessProcessor(Struct, frozen=True):
    """The witness encoder makes rows from encoded bytes; their number varies with the size, so that
    tests meet items of unequal length."""

    image_token_id: int
    base_rows: int = 4
    tile: int = 64
    spread: int = 5
    size: None = None

    @property
    def version(self) -> str:
        return f"witness-v1 {self.base_rows} {self.tile} {self.spread}"

    def num_rows(self, width: int, height: int) -> int:
        return self.base_rows + (height // self.tile + width // self.tile) % self.spread


def load_processor(model_dir: Path) -> ImageProcessor:
    """The processor of a model directory, by its ``model_type``. Raises ConfigError."""
    config = _read_json(model_dir / "config.json")
    if config.get("model_type") == "witness":
        return _witness(config)
    if config.get("model_type") in ("smolvlm", "idefics3"):
        return _fixed_size(config, _read_json(model_dir / "preprocessor_config.json"))
    return NoImages()


def _witness(config: Mapping[str, Any]) -> WitnessProcessor:
    numbers = config.get("processor", {})
    names = ("base_rows", "tile", "spread")
    try:
        return msgspec.convert(
            {name: numbers[name] for name in names if name in numbers}
            | {"image_token_id": config["image_token_id"]},
            WitnessProcessor,
        )
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise ConfigError("the image settings of the model are incomplete") from error


def _fixed_size(config: Mapping[str, Any], pre: Mapping[str, Any]) -> FixedSizeProcessor:
    try:
        vision = config["vision_config"]
        side = int(vision["image_size"])
        rows = (side // int(vision["patch_size"]) // int(config["scale_factor"])) ** 2
        size = pre.get("size", [side, side])
        width, height = (size["width"], size["height"]) if isinstance(size, dict) else size
        processor = FixedSizeProcessor(
            image_token_id=int(config["image_token_id"]),
            size=(int(width), int(height)),
            rows=int(rows),
            mean=tuple(map(float, pre["image_mean"])),
            std=tuple(map(float, pre["image_std"])),
        )
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError("the image settings of the model are incomplete") from error
    _check_sizes(processor, side)
    _check_colours(processor)
    if pre.get("resample", "bicubic") not in ("bicubic", 3) or pre.get("image_tokens", rows) != rows:
        raise ConfigError("the image settings of the model are not supported")
    return processor


def _check_sizes(processor: FixedSizeProcessor, side: int) -> None:
    """Raises ConfigError unless pictures are decoded to what the vision tower takes."""
    if not 1 <= side <= MAX_SIDE or processor.rows < 1:
        raise ConfigError("config.json: image_size, patch_size and scale_factor do not fit together")
    if processor.size != (side, side):
        width, height = processor.size
        raise ConfigError(
            f"preprocessor_config.json: size {width}x{height} is not the vision tower's {side}x{side}"
        )
    if processor.image_token_id < 0:
        raise ConfigError("config.json: image_token_id is no token id")


def _check_colours(processor: FixedSizeProcessor) -> None:
    """Raises ConfigError unless pixels can be normalised. What is not a number fits nowhere."""
    if len(processor.mean) != 3 or not all(abs(value) <= _MAX_COLOUR for value in processor.mean):
        raise ConfigError("preprocessor_config.json: image_mean must be three finite numbers")
    if len(processor.std) != 3 or not all(_MIN_STD <= value <= _MAX_COLOUR for value in processor.std):
        raise ConfigError("preprocessor_config.json: image_std must be three numbers above 0")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path.name} cannot be read") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path.name} is not a JSON object")
    return value
