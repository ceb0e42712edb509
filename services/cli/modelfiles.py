"""Whether the files of a model directory are there, whole, and fit each other, as far as can be told without
reading them all.

Owns the rules for weights: only their headers are read. The rest is read as the router will read it. Without
torch.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from shared.errors import ConfigError
from shared.models.config import ModelConfig
from shared.models.registry import load_config
from shared.multimodal.processor import load_processor
from shared.text.tokenizer import Tokenizer

_MAX_HEADER_BYTES = 100 << 20
_PICTURES = "preprocessor_config.json"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
#: Most misfits that are listed: one wrong number of config.json makes many.
_MAX_MISFITS = 3
_Shapes = Mapping[str, tuple[int, ...]]


def check_files(path: Path) -> None:
    """Raises ConfigError that lists what is missing, cut off, or does not fit ``config.json``. For
    directories with weights."""
    config = load_config(path)
    _refuse(path, [*_tokenizer(path), *_pictures(path, config.image_token_id is not None), *_weights(path)])
    _refuse(path, _misfits(config, _shapes(path)))


def check_prompt_files(path: Path) -> None:
    """The same for a directory without weights: whether prompts can be made."""
    _refuse(path, [*_tokenizer(path), *_pictures(path, False)])


def _refuse(path: Path, problems: Iterable[str]) -> None:
    lines = [f"  {problem}" for problem in problems]
    if lines:
        raise ConfigError("\n".join([f"model {path}:", *lines]))


def _tokenizer(path: Path) -> Iterator[str]:
    """The tokenizer with its settings and the chat template."""
    try:
        spec = json.loads((path / "tokenizer.json").read_bytes())
    except FileNotFoundError:
        yield "there is no tokenizer.json"
        return
    except (OSError, ValueError):
        yield "tokenizer.json cannot be read as JSON"
        return
    if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict):
        yield "tokenizer.json describes no tokenizer"
        return
    try:
        Tokenizer.load(path)
    except ConfigError as error:
        yield error.message
    except (KeyError, TypeError, ValueError, AttributeError):
        yield "tokenizer.json describes no tokenizer"


def _pictures(path: Path, sees: bool) -> Iterator[str]:
    """How pictures are prepared. ``sees``: the model reads some, so that must be said."""
    if sees and not (path / _PICTURES).exists():
        yield f"there is no {_PICTURES}, which says how pictures are prepared"
        return
    try:
        load_processor(path)
    except ConfigError as error:
        yield error.message


def _weights(path: Path) -> Iterator[str]:
    files = sorted(path.glob("*.safetensors"))
    if not files:
        yield "there are no weights (*.safetensors)"
    elif (path / _INDEX).exists():
        yield from _index(path)
    elif not (path / _SINGLE).exists():
        names = ", ".join(file.name for file in files[:2]) + (" ..." if len(files) > 2 else "")
        yield f"there is no {_SINGLE}, and no {_INDEX} that says what is in {names}"
    for file in files:
        try:
            _, promised = _header(file)
            whole = file.stat().st_size == promised
        except (OSError, ValueError, TypeError, KeyError, AttributeError, struct.error):
            yield f"{file.name} is not a safetensors file"
        else:
            if not whole:
                yield f"{file.name} is cut off, or longer than it says"


def _index(path: Path) -> Iterator[str]:
    named = _named(path / _INDEX)
    if not named:
        yield f"{_INDEX} names no files"
    for name in named:
        if Path(name).name != name:
            yield f"{_INDEX} names {name}, which is no file of the model directory"
        elif not (path / name).exists():
            yield f"there is no {name}, which {_INDEX} names"


def _named(index: Path) -> list[str]:
    try:
        return sorted(set(map(str, json.loads(index.read_bytes())["weight_map"].values())))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []


def _header(file: Path) -> tuple[_Shapes, int]:
    """Shapes by name, and the bytes that the header of a safetensors file promises
    (https://github.com/huggingface/safetensors#format)."""
    with file.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        if size > _MAX_HEADER_BYTES:
            raise ValueError("no such header")
        header = json.loads(stream.read(size))
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    shapes = {name: tuple(map(int, entry["shape"])) for name, entry in tensors.items()}
    ends = [entry["data_offsets"][1] for entry in tensors.values()]
    return shapes, int(8 + size + max(ends, default=0))


def _shapes(path: Path) -> _Shapes:
    """Of every tensor of a checkpoint whose files are whole."""
    names = _named(path / _INDEX) if (path / _INDEX).exists() else [_SINGLE]
    return {tensor: shape for name in names for tensor, shape in _header(path / name)[0].items()}


def _misfits(config: ModelConfig, shapes: _Shapes) -> Iterator[str]:
    """Tensors that ``config.json`` wants otherwise: outside of the layers, in the first and in the last."""
    expected = dict(_expected(config))
    wrong = [name for name, shape in expected.items() if shapes.get(name) != shape]
    for name in wrong[:_MAX_MISFITS]:
        if name in shapes:
            yield f"{name} is {list(shapes[name])}; config.json says {list(expected[name])}"
        else:
            yield f"the weights lack {name}, which config.json asks for"
    if len(wrong) > _MAX_MISFITS:
        yield f"and {len(wrong) - _MAX_MISFITS} more tensors that do not fit config.json"
    if f"{config.prefix}layers.{config.num_layers}.input_layernorm.weight" in shapes:
        yield f"the weights hold more than the {config.num_layers} layers of config.json"


def _expected(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    e, i, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * d, config.num_kv_heads * d
    yield f"{config.prefix}embed_tokens.weight", (config.vocab_size, e)
    yield f"{config.prefix}norm.weight", (e,)
    for layer in sorted({0, config.num_layers - 1}):
        at = f"{config.prefix}layers.{layer}."
        yield f"{at}input_layernorm.weight", (e,)
        yield f"{at}self_attn.q_proj.weight", (q, e)
        yield f"{at}self_attn.k_proj.weight", (kv, e)
        yield f"{at}self_attn.v_proj.weight", (kv, e)
        yield f"{at}self_attn.o_proj.weight", (e, q)
        yield f"{at}mlp.gate_proj.weight", (i, e)
        yield f"{at}mlp.up_proj.weight", (i, e)
        yield f"{at}mlp.down_proj.weight", (e, i)
