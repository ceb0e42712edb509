"""Weights of a dense decoder: read from a checkpoint by parameter, fused once, mapped by every worker.

``prepare`` writes one file with QKV and gate-up fused, plain row-major; bfloat16 matrices stay
bfloat16 (the kernels widen them exactly), or all that are multiplied by become int8 with a scale an output;
everything else is float32. All processes map that file and so share its pages. Safetensors only.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

import torch

from shared.errors import ConfigError
from shared.kernels import library
from shared.kernels.decoder import LayerWeights, W
from shared.kernels.linear import Quantized, Weight, quantized
from shared.models.config import ModelConfig, read_json
from shared.models.registry import load_config
from shared.models.tensor_file import TensorFile, write_tensors

#: Raised when the prepared file's content changes.
FORMAT_VERSION = 1
_INDEX = "model.safetensors.index.json"
#: Matrices of products, by the end of their prepared names, and what their scales are called.
_MULTIPLIED = {"qkv", "o", "gate_up", "down", "head"}
_SCALE = "_scale"


class Checkpoint:
    """The safetensors files of a model directory, with or without an index."""

    def __init__(self, model_dir: Path) -> None:
        """Raises ConfigError when there are none, or they are malformed."""
        self.files = tuple(sorted(_checkpoint_files(model_dir)))
        self._by_tensor = {name: file for file in map(TensorFile, self.files) for name in file.tensors}

    def __contains__(self, name: str) -> bool:
        return name in self._by_tensor

    def get(self, name: str) -> torch.Tensor:
        """One tensor, memory-mapped. Raises ConfigError when it is missing or of an unsupported type."""
        file = self._by_tensor.get(name)
        if file is None:
            raise ConfigError(f"the checkpoint lacks tensor {name}")
        tensor = file.get(name)
        if not tensor.is_floating_point():  # somebody's quantization, with scales that would be lost
            raise ConfigError(f"tensor {name} of the checkpoint holds integers; supported: BF16, F16, F32")
        return tensor

    def names(self, prefix: str) -> Iterator[str]:
        """Names of all tensors below ``prefix``."""
        return (name for name in self._by_tensor if name.startswith(prefix))


@dataclass(frozen=True)
class DecoderWeights(Generic[W]):
    """Everything a decoder reads. V = embedding rows; ``head_VE`` holds the valid tokens' rows only."""

    embed_VE: torch.Tensor
    head_VE: W
    norm_E: torch.Tensor
    layers: tuple[LayerWeights[W], ...]


def prepare(model_dir: Path, cache_dir: Path, *, int8: bool = False) -> Path:
    """The prepared weights of a model directory, written to ``cache_dir`` unless they are there; with
    ``int8`` those of matrix products are quantized.

    Keyed by configuration, file sizes and modification times. Several processes may call it at
    once: one writes, the others wait. Raises ConfigError on a bad model, OSError on a full disk.
    """
    config = load_config(model_dir)
    kind = "int8" if int8 else "weights"
    target = cache_dir / f"{kind}-{_key(model_dir)}.safetensors"
    cache_dir.mkdir(parents=True, exist_ok=True)
    with (cache_dir / "weights.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _intact(target):
            _write(config, Checkpoint(model_dir), target, int8=int8)
    return target


def load(path: Path, config: ModelConfig) -> DecoderWeights[Weight]:
    """Map prepared weights. Raises ConfigError when the file does not fit the configuration.

    Where the kernels are not compiled, matrices are widened to float32 here, in private memory.
    """
    file = TensorFile(path)

    def get(name: str) -> torch.Tensor:
        tensor = file.get(name)
        return tensor if library.available() else tensor.float()

    def matrix(name: str) -> Weight:
        scale = f"{name}{_SCALE}"
        return Quantized(file.get(name), file.get(scale)) if scale in file.tensors else get(name)

    def layer(i: int) -> LayerWeights[Weight]:
        def optional(name: str) -> torch.Tensor | None:
            return get(f"{i}.{name}") if f"{i}.{name}" in file.tensors else None

        return LayerWeights(
            attn_norm_E=get(f"{i}.attn_norm"),
            qkv_WE=matrix(f"{i}.qkv"),
            o_EW=matrix(f"{i}.o"),
            mlp_norm_E=get(f"{i}.mlp_norm"),
            gate_up_2IE=matrix(f"{i}.gate_up"),
            down_EI=matrix(f"{i}.down"),
            qkv_bias_W=optional("qkv_bias"),
            o_bias_E=optional("o_bias"),
            gate_up_bias_2I=optional("gate_up_bias"),
            down_bias_E=optional("down_bias"),
            q_norm_D=optional("q_norm"),
            k_norm_D=optional("k_norm"),
            index=i,
        )

    embed_VE = get("embed")
    head_VE = matrix("head") if "head" in file.tensors else embed_VE
    valid = config.num_valid_tokens
    head_VE = head_VE.first(valid) if isinstance(head_VE, Quantized) else head_VE[:valid]
    layers = tuple(layer(i) for i in range(config.num_layers))
    weights = DecoderWeights(embed_VE, head_VE, get("norm"), layers)
    _check_shapes(weights, config)
    return weights


def _checkpoint_files(model_dir: Path) -> set[Path]:
    index = model_dir / _INDEX
    if not index.exists():
        return {model_dir / "model.safetensors"}
    names = read_json(index).get("weight_map", {})
    if not isinstance(names, dict) or not names:
        raise ConfigError(f"{_INDEX} has no weight_map")
    files = {str(name) for name in names.values()}
    # A checkpoint names files beside it, never elsewhere.
    if any(Path(name).name != name for name in files):
        raise ConfigError(f"{_INDEX} names a file outside of the model directory")
    return {model_dir / name for name in files}


def _key(model_dir: Path) -> str:
    digest = hashlib.sha256((model_dir / "config.json").read_bytes())
    for path in sorted(_checkpoint_files(model_dir)):
        try:
            status = path.stat()
        except OSError as error:
            raise ConfigError(f"{path.name} of the model directory cannot be read") from error
        digest.update(json.dumps([FORMAT_VERSION, path.name, status.st_size, status.st_mtime_ns]).encode())
    return digest.hexdigest()[:24]


def _intact(path: Path) -> bool:
    if not path.exists():
        return False
    try:
        TensorFile(path)
    except ConfigError:
        return False
    return True


def _write(config: ModelConfig, checkpoint: Checkpoint, target: Path, *, int8: bool) -> None:
    tensors: dict[str, tuple[torch.dtype, Iterable[torch.Tensor]]] = {}
    for name, sources in _sources(config, own_head=int8):
        parts = [checkpoint.get(source) for source in sources]
        if int8 and name.split(".")[-1] in _MULTIPLIED:
            tensors[name] = (torch.int8, _Parts(parts, lambda part: quantized(part).values_NK))
            tensors[f"{name}{_SCALE}"] = (torch.float32, [quantized(part).scale_N for part in parts])
            continue
        lossless = parts[0].dim() == 2 and all(part.dtype == torch.bfloat16 for part in parts)
        tensors[name] = (torch.bfloat16 if lossless else torch.float32, parts)
    write_tensors(target, tensors)


class _Parts(Iterable[torch.Tensor]):
    """Tensors that are made from others when they are wanted, and not kept."""

    def __init__(self, parts: Sequence[torch.Tensor], make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._parts, self._make = parts, make

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(self._make, self._parts)


def _sources(config: ModelConfig, *, own_head: bool = False) -> Iterator[tuple[str, list[str]]]:
    """Prepared name, and the checkpoint's tensors that are stacked to make it. ``own_head``: the output
    matrix is written even where it is the embedding's."""
    yield "embed", [f"{config.prefix}embed_tokens.weight"]
    yield "norm", [f"{config.prefix}norm.weight"]
    if not config.tie_embeddings:
        yield "head", [f"{config.head_prefix}lm_head.weight"]
    elif own_head:
        yield "head", [f"{config.prefix}embed_tokens.weight"]
    for i in range(config.num_layers):
        at = f"{config.prefix}layers.{i}."
        qkv = [f"{at}self_attn.{x}_proj" for x in "qkv"]
        gate_up = [f"{at}mlp.{x}_proj" for x in ("gate", "up")]
        yield f"{i}.attn_norm", [f"{at}input_layernorm.weight"]
        yield f"{i}.mlp_norm", [f"{at}post_attention_layernorm.weight"]
        yield f"{i}.qkv", [f"{name}.weight" for name in qkv]
        yield f"{i}.o", [f"{at}self_attn.o_proj.weight"]
        yield f"{i}.gate_up", [f"{name}.weight" for name in gate_up]
        yield f"{i}.down", [f"{at}mlp.down_proj.weight"]
        if config.qkv_bias:
            yield f"{i}.qkv_bias", [f"{name}.bias" for name in qkv]
        if config.o_bias:
            yield f"{i}.o_bias", [f"{at}self_attn.o_proj.bias"]
        if config.mlp_bias:
            yield f"{i}.gate_up_bias", [f"{name}.bias" for name in gate_up]
            yield f"{i}.down_bias", [f"{at}mlp.down_proj.bias"]
        if config.qk_norm:
            yield f"{i}.q_norm", [f"{at}self_attn.q_norm.weight"]
            yield f"{i}.k_norm", [f"{at}self_attn.k_norm.weight"]


def _check_shapes(weights: DecoderWeights[Weight], config: ModelConfig) -> None:
    """Compiled kernels read by address, so shapes are checked before the first step."""
    e, i, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, w = config.num_heads * d, (config.num_heads + 2 * config.num_kv_heads) * d
    pairs: list[tuple[Weight, tuple[int, ...]]] = [
        (weights.embed_VE, (config.vocab_size, e)),
        (weights.head_VE, (config.num_valid_tokens, e)),
        (weights.norm_E, (e,)),
    ]
    for layer in weights.layers:
        pairs += [
            (layer.attn_norm_E, (e,)),
            (layer.mlp_norm_E, (e,)),
            (layer.qkv_WE, (w, e)),
            (layer.o_EW, (e, q)),
            (layer.gate_up_2IE, (2 * i, e)),
            (layer.down_EI, (e, i)),
        ]
        optional = [
            (layer.qkv_bias_W, w),
            (layer.o_bias_E, e),
            (layer.gate_up_bias_2I, 2 * i),
            (layer.down_bias_E, e),
            (layer.q_norm_D, d),
            (layer.k_norm_D, d),
        ]
        pairs += [(tensor, (size,)) for tensor, size in optional if tensor is not None]
    for tensor, shape in pairs:
        if tuple(tensor.shape) != shape:
            raise ConfigError(f"a weight has shape {tuple(tensor.shape)} where config.json says {shape}")
