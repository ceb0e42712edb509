"""Whether the files of a model directory are there and whole, as far as can be told without reading them all.

Owns the rules; what the files mean is the workers' business. Only headers of weights are read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from shared.errors import ConfigError

_MAX_HEADER_BYTES = 100 << 20
_PICTURES = "preprocessor_config.json"


def check_files(path: Path, *, sees: bool = False) -> None:
    """Raises ConfigError that lists what is missing or cut off. For directories with weights; ``sees``: of a
    model that reads pictures."""
    problems = [*_tokenizer(path / "tokenizer.json"), *_weights(path)]
    if sees and not (path / _PICTURES).exists():
        problems.append(f"there is no {_PICTURES}, which says how pictures are prepared")
    if problems:
        raise ConfigError(f"model {path}:\n" + "\n".join(f"  {problem}" for problem in problems))


def _tokenizer(file: Path) -> Iterator[str]:
    try:
        spec = json.loads(file.read_bytes())
    except FileNotFoundError:
        yield "there is no tokenizer.json"
    except (OSError, ValueError):
        yield "tokenizer.json cannot be read as JSON"
    else:
        if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict):
            yield "tokenizer.json describes no tokenizer"


def _weights(path: Path) -> Iterator[str]:
    files = sorted(path.glob("*.safetensors"))
    if not files:
        yield "there are no weights (*.safetensors)"
    index = path / "model.safetensors.index.json"
    if index.exists():
        named = _named(index)
        if not named:
            yield f"{index.name} names no files"
        missing = [name for name in named if not (path / name).exists()]
        yield from (f"there is no {name}, which {index.name} names" for name in missing)
    for file in files:
        try:
            whole = file.stat().st_size == _length(file)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, struct.error):
            yield f"{file.name} is not a safetensors file"
        else:
            if not whole:
                yield f"{file.name} is cut off, or longer than it says"


def _named(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []


def _length(file: Path) -> int:
    """Bytes that the header of a safetensors file promises
    (https://github.com/huggingface/safetensors#format)."""
    with file.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        if size > _MAX_HEADER_BYTES:
            raise ValueError("no such header")
        header = json.loads(stream.read(size))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return int(8 + size + max(ends, default=0))
