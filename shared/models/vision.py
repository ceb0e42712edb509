"""Vision towers: one small adapter a family around the modules of transformers.

Owns how decoded pixels become embedding rows. transformers is imported when a tower is built, and
only the modules that it needs: the language model is never constructed.
Shapes: N = tiles of a picture, H and W = pixels, C = colours, P = patches, E = hidden features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from shared.errors import ConfigError
from shared.models.config import read_json
from shared.models.weights import Checkpoint


class VisionTower(Protocol):
    """A picture's way to embedding rows. ``hidden_size`` is that of the language model."""

    @property
    def hidden_size(self) -> int: ...

    def encode(self, pixels_NHWC: torch.Tensor) -> torch.Tensor:
        """Embedding rows [rows, E] in float32 of one picture's uint8 RGB tiles, in order."""
        ...


def load_vision_tower(model_dir: Path) -> VisionTower:
    """The vision tower of a model directory, in float32. Raises ConfigError: unreadable, no vision
    part, or a family that is not supported (the message lists those that are)."""
    config = read_json(model_dir / "config.json")
    family = str(config.get("model_type"))
    build = FAMILIES.get(family)
    if build is None:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError(f"model type {family} has no supported vision tower; supported: {known}")
    settings = read_json(model_dir / "preprocessor_config.json")
    return build(config, settings, Checkpoint(model_dir))


class _SmolVLM:
    """SmolVLM (Idefics3): a SigLIP tower, then pixel shuffle and one projection."""

    def __init__(
        self, config: Mapping[str, Any], settings: Mapping[str, Any], checkpoint: Checkpoint
    ) -> None:
        from transformers.models.smolvlm.configuration_smolvlm import SmolVLMConfig
        from transformers.models.smolvlm.modeling_smolvlm import SmolVLMConnector, SmolVLMVisionTransformer

        full = SmolVLMConfig(**config)
        full.vision_config._attn_implementation = "sdpa"
        self._tower = _filled(SmolVLMVisionTransformer(full.vision_config), checkpoint, "model.vision_model.")
        self._connector = _filled(SmolVLMConnector(full), checkpoint, "model.connector.")
        self._scale_C, self._shift_C = _normalisation(settings)
        self.hidden_size = int(full.text_config.hidden_size)

    def encode(self, pixels_NHWC: torch.Tensor) -> torch.Tensor:
        normal_NHWC = pixels_NHWC.float() * self._scale_C + self._shift_C
        patches_NPE = self._tower(normal_NHWC.permute(0, 3, 1, 2).contiguous()).last_hidden_state
        rows: torch.Tensor = self._connector(patches_NPE).flatten(0, 1)
        return rows


#: ``model_type`` in ``config.json`` -> builder of its tower.
FAMILIES: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any], Checkpoint], VisionTower]] = {
    "smolvlm": _SmolVLM,
}


def _normalisation(settings: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, shift) a colour, so that value * scale + shift = (value / 255 - mean) / std."""
    try:
        mean, std = (torch.tensor([float(v) for v in settings[k]]) for k in ("image_mean", "image_std"))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError("preprocessor_config.json lacks image_mean and image_std") from error
    if not (torch.isfinite(mean).all() and (std > 0).all()):
        raise ConfigError("preprocessor_config.json: image_mean and image_std cannot normalise a picture")
    return 1.0 / (255.0 * std), -mean / std


def _filled(module: Any, checkpoint: Checkpoint, prefix: str) -> Any:
    """The module with its weights from the checkpoint, all of them and no others, in float32."""
    state = {name[len(prefix) :]: checkpoint.get(name).float() for name in checkpoint.names(prefix)}
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise ConfigError(f"the checkpoint's tensors below {prefix} do not fit config.json") from error
    return module.eval().requires_grad_(False)
